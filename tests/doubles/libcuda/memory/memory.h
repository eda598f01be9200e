/* Device memory that one call takes and another frees. */
#ifndef FAKECUDA_MEMORY_H
#define FAKECUDA_MEMORY_H

#include "memory/ranges.h"

enum {
    GRANULARITY = 512,    /* bytes: cuMemAlloc and its like */
    PAGE_BYTES = 2 << 20, /* bytes: pools, graphs and virtual memory management */
    ARRAY_GRANULARITY = 64 << 10,
};

static inline uint64_t fake_round(uint64_t bytes, uint64_t granularity) {
    return (bytes + granularity - 1) / granularity * granularity;
}

/* Return the context whose end frees what is allocated in this one: a green one's memory is the primary context's. With
 * fake_lock. */
struct context *fake_memory_owner(struct context *context);
/* Take memory of the context's device at an address of its own. With fake_lock. */
CUresult fake_memory_take(struct context *context, enum fake_kind kind, enum range_kind range_kind, uint64_t bytes,
                          struct range **out);
/* Free a range, or leave it to its pool or graph. */
void fake_memory_return(struct range *range);
/* Free the memory that was allocated in a context, and forget host memory registered in it. */
void fake_memory_of_context_gone(struct context *context);

#endif
