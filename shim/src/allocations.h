/* The table of this process's allocations. All calls with the lock of struct gpus. */
#ifndef SHAREPOD_ALLOCATIONS_H
#define SHAREPOD_ALLOCATIONS_H

#include <stdbool.h>

#include "memory.h"

/* Makes room for one more; false when the kernel gives no memory. */
bool allocations_grow(struct memory *memory);
/* After allocations_grow. */
void allocations_add(struct memory *memory, struct allocation allocation);
/* Takes it out; false if the address is none of ours. */
bool allocations_take(struct memory *memory, CUdeviceptr address, struct allocation *allocation);

#endif
