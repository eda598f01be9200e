/* Linear and managed device memory. */
#ifndef FAKECUDA_MEMORY_H
#define FAKECUDA_MEMORY_H

#include "memory/ranges.h"

enum {
    GRANULARITY = 512,    /* bytes: granularity of cuMemAlloc and similar calls */
    PAGE_BYTES = 2 << 20, /* bytes: granularity of pools, graphs and virtual memory management */
    ARRAY_GRANULARITY = 64 << 10,
};

static inline uint64_t fake_round(uint64_t bytes, uint64_t granularity) {
    return (bytes + granularity - 1) / granularity * granularity;
}

/* Return the context whose end frees memory that is allocated in this context: for a green context, the primary
 * context. With fake_lock. */
struct context *fake_memory_owner(struct context *context);
/* Take memory of the context's device, and assign it a new address range. With fake_lock. */
CUresult fake_memory_take(struct context *context, enum fake_kind kind, enum range_kind range_kind, uint64_t bytes,
                          struct range **out);
/* Free a range, or return it to its pool or graph. */
void fake_memory_return(struct range *range);
/* Free the memory that was allocated in a context, and unregister host memory in it. */
void fake_memory_of_context_gone(struct context *context);

#endif
