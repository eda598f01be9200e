/* Allocation table: everything of this process whose end gives device memory back, found by the program's name for it.
 *
 * A hash table with a bucket list. All calls with the lock of struct gpus. The kernel, not a heap, gives its memory.
 */
#ifndef SHAREPOD_ALLOCATIONS_H
#define SHAREPOD_ALLOCATIONS_H

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/slab.h"

/* Kinds, and the key of each. */
enum allocation_kind {
    ALLOCATION_LINEAR,  /* linear memory: its address */
    ALLOCATION_ARRAY,   /* array or mipmapped array: its handle */
    ALLOCATION_HANDLE,  /* handle of physical memory (cuMemCreate): the handle */
    ALLOCATION_MAPPING, /* mapping of physical memory: the address where it begins */
    ALLOCATION_SPARSE,  /* mapping of physical memory into a sparse array: a hash of the array's part */
    ALLOCATION_CONTEXT, /* context: its handle */
    ALLOCATION_LIMIT,   /* bytes that cuCtxSetLimit added: context and limit */
    ALLOCATION_GRAPH    /* executable graph with memory nodes: its handle and the device */
};

struct physical;

struct allocation {
    struct allocation *next; /* in its bucket, or in a list that was taken out */
    uint64_t key;
    uint64_t bytes;    /* charged; of a graph: what a launch may take; of a mapping: its length */
    CUcontext context; /* it ends with this context; NULL: it outlives contexts */
    union {
        struct physical *physical; /* of a handle or a mapping; of linear memory of which a descriptor was made */
        uint64_t mark; /* of a limit: bytes at the default; of a graph: trims before its last launch, plus 1 */
    };
    CUarray array; /* of a sparse mapping */
    int8_t place;  /* of its GPU in struct gpus; -1: nothing is charged for it */
    uint8_t kind;  /* enum allocation_kind */
};

struct allocation_table {
    struct allocation **buckets;
    size_t bucket_count, count;
    struct slab slab;
};

/* Return a zeroed allocation, to be filled and then added or dropped; NULL when the kernel gives no memory. */
struct allocation *allocations_make(struct allocation_table *table);
/* Put a filled allocation into the table. Never fails. */
void allocations_add(struct allocation_table *table, struct allocation *allocation);
/* Free an allocation that is not in the table. */
void allocations_drop(struct allocation_table *table, struct allocation *allocation);
/* Return the newest allocation of that key; NULL if there is none. */
struct allocation *allocations_find(const struct allocation_table *table, enum allocation_kind kind, uint64_t key);
/* Take the newest allocation of that key out of the table; NULL if there is none. */
struct allocation *allocations_take(struct allocation_table *table, enum allocation_kind kind, uint64_t key);
/* Take out one allocation that ends with the context; NULL: none is left. `at`: 0 in the first call, then kept. */
struct allocation *allocations_take_of(struct allocation_table *table, CUcontext context, size_t *at);
/* Take out all allocations for which `matches(allocation, of)` is true; return them as a list. Looks at the whole
 * table. */
struct allocation *allocations_take_all(struct allocation_table *table,
                                        bool (*matches)(const struct allocation *, const void *of), const void *of);

#endif
