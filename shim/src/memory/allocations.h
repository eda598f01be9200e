/* The table of what this process holds: everything whose end gives device memory back, found by what the program names
 * it by. All calls with the lock of struct gpus.
 */
#ifndef SHAREPOD_HOLDINGS_H
#define SHAREPOD_HOLDINGS_H

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/slab.h"

enum holding_kind {
    HOLDING_LINEAR,  /* by its address */
    HOLDING_ARRAY,   /* by its handle; mipmapped ones too */
    HOLDING_HANDLE,  /* of physical memory (cuMemCreate): by the handle */
    HOLDING_MAPPING, /* of physical memory: by the address where it begins */
    HOLDING_SPARSE,  /* of physical memory into an array: by what part of it */
    HOLDING_CONTEXT, /* by its handle */
    HOLDING_LIMIT,   /* what cuCtxSetLimit added: by context and limit */
    HOLDING_GRAPH    /* executable graph with memory nodes: by its handle; the bytes are what a launch may take */
};

struct physical;

struct holding {
    struct holding *next;
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

struct holdings {
    struct holding **buckets;
    size_t bucket_count, count;
    struct slab slab;
};

/* A free one, to be filled and added or dropped; NULL when the kernel gives no memory. */
struct holding *holdings_make(struct holdings *holdings);
void holdings_add(struct holdings *holdings, struct holding *holding);
void holdings_drop(struct holdings *holdings, struct holding *holding);
/* The newest of that key; NULL if there is none. */
struct holding *holdings_find(const struct holdings *holdings, enum holding_kind kind, uint64_t key);
/* The same, taken out of the table. */
struct holding *holdings_take(struct holdings *holdings, enum holding_kind kind, uint64_t key);
/* Takes out one that ends with the context; NULL: none is left. `at` begins at 0 and is kept between calls. */
struct holding *holdings_take_of(struct holdings *holdings, CUcontext context, size_t *at);
/* Takes out all that match; they come as a list. */
struct holding *holdings_take_all(struct holdings *holdings, bool (*matches)(const struct holding *, const void *of),
                                  const void *of);

#endif
