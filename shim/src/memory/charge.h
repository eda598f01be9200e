/* The charge of a call: what it will take of device memory is reserved before the driver is asked.
 *
 * Guarantees: on a GPU whose limit is enforced, no call returns success that takes what is counted over the limit; what
 * a failed call was to take, and what a freed thing took, goes back.
 */
#ifndef SHAREPOD_CHARGE_H
#define SHAREPOD_CHARGE_H

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

#include "memory/allocations.h"

/* Something that takes memory, on its way: reserved, to be made by the driver, then held or rolled back. */
struct charge {
    struct allocation *allocation; /* NULL: nothing is counted, the driver has the word */
};

/* On a GPU; `context`: what it ends with, or NULL. CUDA_ERROR_OUT_OF_MEMORY if the bytes are not to be had. */
CUresult charge_begin(struct charge *charge, CUcontext context, int place, uint64_t bytes);
void charge_end(struct charge *charge, bool made, enum allocation_kind kind, uint64_t key);

/* Taken out before the driver frees it: its name may be given to another thread's at once. NULL: not counted. */
struct allocation *uncharge_begin(enum allocation_kind kind, uint64_t key);
void uncharge_end(struct allocation *allocation, bool freed);

/* Its table are booked under another handle, until it is known whether it has ended. */
void memory_rename_context(CUcontext from, CUcontext to);

#endif
