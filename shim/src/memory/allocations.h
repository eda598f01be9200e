/* Allocation table: all objects of this process that free device memory when they end, by handle or address.
 *
 * A hash table with a list per bucket. Callers of all functions hold the lock of struct gpus.
 */
#ifndef SHAREPOD_ALLOCATIONS_H
#define SHAREPOD_ALLOCATIONS_H

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/slab.h"

/* Kinds of allocations, with the key of each. */
enum allocation_kind {
    ALLOCATION_LINEAR,  /* linear memory: its address */
    ALLOCATION_ARRAY,   /* array or mipmapped array: its handle */
    ALLOCATION_HANDLE,  /* handle of physical memory (cuMemCreate): the handle */
    ALLOCATION_MAPPING, /* mapping of physical memory: the address where it begins */
    ALLOCATION_SPARSE,  /* mapping of physical memory into a sparse array: hash of the mapped part of the array */
    ALLOCATION_CONTEXT, /* context: its handle */
    ALLOCATION_LIMIT,   /* memory that cuCtxSetLimit added to a context: hash of context and limit */
    ALLOCATION_GRAPH    /* executable graph with memory nodes: hash of its handle and the device */
};

struct physical;

struct allocation {
    struct allocation *next; /* next allocation of the bucket, or of a list that was removed from the table */
    uint64_t key;
    uint64_t bytes;    /* charged bytes. Of a graph: the largest number that a launch can
                          allocate. Of a mapping: its length */
    CUcontext context; /* the allocation ends with this context; NULL: it outlives contexts */
    union {
        struct physical *physical; /* memory of a handle or mapping; of linear memory only if a descriptor of it was
                                      exported */
        uint64_t mark; /* of a limit: bytes that the context reserves at its default value. Of a graph: 1 plus the
                          number of trims of the graph pool at the graph's last launch; 0: not launched */
    };
    CUarray array; /* of a sparse mapping: its array */
    int8_t place;  /* place of its GPU in struct gpus; -1: nothing is charged */
    uint8_t kind;  /* enum allocation_kind */
};

struct allocation_table {
    struct allocation **buckets;
    size_t bucket_count, count;
    struct slab slab;
};

/* Return a zeroed allocation; NULL: host memory is exhausted. The caller fills it, and then passes it to
 * allocations_add or allocations_drop. */
struct allocation *allocations_make(struct allocation_table *table);
/* Add a filled allocation to the table. Never fails. */
void allocations_add(struct allocation_table *table, struct allocation *allocation);
/* Free an allocation that is not in the table. */
void allocations_drop(struct allocation_table *table, struct allocation *allocation);
/* Return the newest allocation with this kind and key; NULL: there is none. */
struct allocation *allocations_find(const struct allocation_table *table, enum allocation_kind kind, uint64_t key);
/* Remove the newest allocation with this kind and key from the table, and return it; NULL: there is none. */
struct allocation *allocations_take(struct allocation_table *table, enum allocation_kind kind, uint64_t key);
/* Remove one allocation that ends with this context from the table, and return it; NULL: none is left. `*at`: 0 in the
 * first call, kept by the caller between calls. */
struct allocation *allocations_take_of(struct allocation_table *table, CUcontext context, size_t *at);
/* Remove all allocations for which `matches(allocation, of)` is true, and return them as a list. Takes time in
 * proportion to the whole table. */
struct allocation *allocations_take_all(struct allocation_table *table,
                                        bool (*matches)(const struct allocation *, const void *of), const void *of);

#endif
