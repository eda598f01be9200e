/* Physical memory (cuMemCreate) and multicast objects, and what refers to them: handles, mappings, bindings. */
#ifndef SHAREPOD_PHYSICAL_H
#define SHAREPOD_PHYSICAL_H

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

#include "memory/allocations.h"

enum { MAPPING_STEP = 2 << 20 }; /* bytes: mappings begin and end at multiples of this */

/* What keeps physical memory bound to a multicast object. */
struct binding {
    struct binding *next;
    struct physical *bound;
    uint64_t at, bytes;
};

/* With the lock of struct gpus. */
struct physical {
    uint64_t bytes; /* 0: another process's, or a multicast object */
    int place;
    uint32_t handles;         /* references that handles are */
    uint32_t mappings;        /* mappings and bindings */
    uint32_t pins;            /* and calls under way */
    struct binding *bindings; /* of a multicast object */
};

/* A handle and what it stands for, pinned, and not in the table yet; NULL when the kernel gives no memory. */
struct allocation *physical_begin(uint64_t bytes, int place);
/* After the driver's call. */
void physical_end(struct allocation *allocation, bool made, CUmemGenericAllocationHandle handle);
/* With the lock. NULL: not known. */
struct physical *physical_of(CUmemGenericAllocationHandle handle);
/* What is mapped at an address, and how many bytes of that mapping are left from there. With the lock. */
struct physical *physical_at(uint64_t address, uint64_t *left);
/* With the lock, and lets go of it; what nothing refers to any more is free. `physical` may be NULL. */
void physical_unlock(struct physical *physical);
/* These bindings, out of their object's list, are gone. Without the lock. */
void physical_unbound(struct binding *bindings);

#endif
