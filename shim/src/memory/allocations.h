/* The table of what this process holds: everything whose end gives device memory back, found by what the program names
 * it by. All calls with the lock of struct gpus.
 */
#ifndef SHAREPOD_ALLOCATIONS_H
#define SHAREPOD_ALLOCATIONS_H

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/slab.h"

enum allocation_kind {
    ALLOCATION_LINEAR,  /* by its address */
    ALLOCATION_ARRAY,   /* by its handle; mipmapped ones too */
    ALLOCATION_HANDLE,  /* of physical memory (cuMemCreate): by the handle */
    ALLOCATION_MAPPING, /* of physical memory: by the address where it begins */
    ALLOCATION_SPARSE,  /* of physical memory into an array: by what part of it */
    ALLOCATION_CONTEXT, /* by its handle */
    ALLOCATION_LIMIT,   /* what cuCtxSetLimit added: by context and limit */
    ALLOCATION_GRAPH    /* executable graph with memory nodes: by its handle; the bytes are what a launch may take */
};

struct physical;

struct allocation {
    struct allocation *next;
    uint64_t key;
    uint64_t bytes;
    CUcontext context; /* it ends with this context; NULL: it outlives them */
    union {
        struct physical *physical; /* of a handle or a mapping */
        uint64_t mark;
    };
    CUarray array; /* of a sparse mapping */
    int8_t place;  /* of its GPU; -1: none of the tenant's */
    uint8_t kind;
};

struct allocation_table {
    struct allocation **buckets;
    size_t bucket_count, count;
    struct slab slab;
};

/* A free one, to be filled and added or dropped; NULL when the kernel gives no memory. */
struct allocation *allocations_make(struct allocation_table *table);
void allocations_add(struct allocation_table *table, struct allocation *allocation);
void allocations_drop(struct allocation_table *table, struct allocation *allocation);
/* The newest of that key; NULL if there is none. */
struct allocation *allocations_find(const struct allocation_table *table, enum allocation_kind kind, uint64_t key);
/* The same, taken out of the table. */
struct allocation *allocations_take(struct allocation_table *table, enum allocation_kind kind, uint64_t key);
/* Takes out one that ends with the context; NULL: none is left. `at` begins at 0 and is kept between calls. */
struct allocation *allocations_take_of(struct allocation_table *table, CUcontext context, size_t *at);
/* Takes out all that match; they come as a list. */
struct allocation *allocations_take_all(struct allocation_table *table,
                                        bool (*matches)(const struct allocation *, const void *of), const void *of);

#endif
