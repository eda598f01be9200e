/* Device memory that a call takes and another gives back. */
#ifndef FAKECUDA_MEMORY_H
#define FAKECUDA_MEMORY_H

#include "memory/ranges.h"

enum {
    GRANULARITY = 512,    /* of cuMemAlloc and what is like it */
    PAGE_BYTES = 2 << 20, /* of pools, graphs and virtual memory management */
    ARRAY_GRANULARITY = 64 << 10,
};

static inline uint64_t fake_round(uint64_t bytes, uint64_t granularity) {
    return (bytes + granularity - 1) / granularity * granularity;
}

/* Takes memory of the context's device under an address of its own; with fake_lock. */
CUresult fake_memory_take(struct context *context, enum fake_kind kind, enum range_kind range_kind, uint64_t bytes,
                          struct range **out);
/* Frees it, or leaves it to its pool or graph. */
void fake_memory_return(struct range *range);
/* What was allocated in the context, and host memory registered in it, ends with it. */
void fake_memory_of_context_gone(struct context *context);

#endif
