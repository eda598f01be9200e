/* What this process holds of device memory, and the lock that all of it is read and written with: that of struct gpus.
 *
 * The one struct memory of the process lies in struct process. The functions of this room reach it by books(), which is
 * valid once credits_prepare() was called: after process_enter().
 */
#ifndef SHAREPOD_BOOKS_H
#define SHAREPOD_BOOKS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/slab.h"
#include "memory/allocations.h"
#include "session/session.h"
#include "tenant/gpus.h"

struct growing;

/* With the lock of struct gpus. */
struct memory {
    struct gpus *gpus;
    struct session *session;
    /* Counts what the driver has given back by itself on a GPU; true: that was something. Without the lock. */
    bool (*refresh)(int place);
    struct holdings holdings;
    struct slab physical_slab, binding_slab;
    uint64_t largest_mapping; /* bytes */
    uint64_t sparse;          /* mappings into sparse arrays */
    struct growing *growing;
    struct slab growing_slab;
    bool growing_watched;
    uint64_t chunk;   /* pools grow by multiples of this or of a part of it; 0: not seen yet */
    uint64_t surplus; /* the most that one was seen to grow by beyond what its call needed: less than the step */
    uint64_t next_look;      /* the agent thread's */
    _Atomic bool graphs;     /* some graph may have memory nodes */
    uint32_t contexts[16];   /* of this process on each GPU */
    uint64_t overhead[16];   /* what they took */
    struct lock limit_lock;  /* cuCtxSetLimit, which reads and writes */
};

/* NULL before the first CUDA call of the program. Zeroed, as struct process is, in a child of fork. */
extern struct memory *_Atomic the_memory;

static inline struct memory *books(void) {
    return atomic_load_explicit(&the_memory, memory_order_relaxed);
}

static inline void books_lock(void) {
    lock(&books()->gpus->lock);
}

static inline void books_unlock(void) {
    unlock(&books()->gpus->lock);
}

/* Round up to a multiple of `step`, or, where there is none, to more than any GPU has. */
static inline uint64_t memory_rounded(uint64_t bytes, uint64_t step) {
    return bytes > UINT64_MAX - step ? UINT64_MAX / step * step : (bytes + step - 1) / step * step;
}

#endif
