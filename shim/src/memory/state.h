/* State of this process's device memory: its allocations, and the bytes that its memory pools have reserved.
 *
 * Invariants of memory/ and wrappers/memory, cited by name:
 *
 * C1 charged-before-taken: on a GPU whose limit is enforced, the bytes of a call are charged before the driver's call.
 *    If only the driver knows their number (a pitch, a pool), the expected bytes are charged before the call, and the
 *    rest right after it. If the rest is refused, the call is undone and fails. So no call that exceeds the limit
 *    returns success. Exception: a graph launch cannot be undone (C5).
 * C2 failed-call-gives-back: the whole charge is returned when a call fails, and when memory is freed.
 * C3 out-before-free: an allocation leaves the table before the driver frees it, because the driver may give its handle
 *    or address to another thread at once. If the driver fails to free the allocation, it returns to the table.
 * C4 no-wait-with-lock: no thread holds the lock during a driver call or a request to the agent.
 * C5 growth-is-counted: memory that the driver takes without a call that the hook could refuse is charged even over the
 *    limit. It is reported to the agent as soon as the agent receives frames.
 * C6 idle-goes-back: unused credits are returned to the agent:
 *    - at once, beyond CREDITS_IDLE_MOST and the amount that the program allocated again each time;
 *    - when the agent recalls them;
 *    - when the limit is lowered;
 *    - after they were idle for one to two times CREDITS_LOOK_NS.
 *
 * There is one struct memory, in struct process. memory_state() is valid after credits_prepare(), and so after
 * process_enter().
 */
#ifndef SHAREPOD_MEMORY_STATE_H
#define SHAREPOD_MEMORY_STATE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/hashed.h"
#include "base/slab.h"
#include "memory/allocations.h"
#include "memory/kinds.h"
#include "session/session.h"
#include "tenant/gpus.h"

struct pool_memory;
struct export;

enum { MEMORY_GRANULARITY = 512 }; /* bytes: the driver rounds each allocation up to a multiple of this */
enum {
    MEMORY_CURRENT_POOLS = 16
}; /* number of devices whose current memory pool is cached; for other devices the driver is queried each time */

/* The lock of struct gpus guards all members, except members marked "unguarded". */
struct memory {
    struct gpus *gpus;       /* unguarded */
    struct session *session; /* unguarded */
    /* Callback: returns the charges of memory that was freed on the GPU at `place` without a call of the program. True
     * if there was any. `wait`: also wait, for at most 1 s, for memory that streams are about to free. The caller
     * must not hold the lock. */
    bool (*refresh)(int place, bool wait);
    struct allocation_table allocations;
    struct slab physical_slab, binding_slab, export_slab;
    struct hashed exports_table;
    struct export *exports;           /* exported descriptors that were open at the last count */
    size_t export_count, export_most; /* length of that list; length at which open descriptors are counted again */
    size_t export_asked;              /* calls of exports_count_seldom since the last count */
    struct physical *lingering;       /* physical memory to which only exported descriptors refer */
    uint64_t physical_next_look;      /* sys_now() of the next check of `lingering`; unguarded: only the hook thread
                                         uses it */
    _Atomic uint32_t giving_back; /* number of threads that have taken entries off `lingering` and not yet returned all
                                     their charges; unguarded */
    _Atomic uint32_t given_back;  /* number of times so far that a thread has returned such charges; unguarded */
    uint64_t largest_mapping;     /* bytes: the longest mapping so far */
    uint64_t sparse;              /* number of mappings into sparse arrays */
    struct pool_memory *pools;    /* all pools registered so far, the newest first */
    struct slab pool_slab;
    bool pools_watched;       /* the hook thread regularly reads the bytes that the driver reports for pools */
    uint64_t pool_chunk;      /* bytes: step in which the driver grows pools, as learned so far: that step or a multiple
                                 of it. 0: no pool has grown yet */
    uint64_t pool_surplus;    /* bytes: largest growth of a pool beyond the bytes that the call needed. It is less than
                                 the driver's step */
    uint64_t pools_next_look; /* sys_now() of the hook thread's next check; unguarded */
    _Atomic bool graph_pools; /* a graph may have memory nodes; unguarded */
    uint32_t contexts[SHP_MAX_GPUS];                  /* by place of the GPU: number of this process's contexts there */
    uint64_t overhead[SHP_MAX_GPUS];                  /* bytes charged for these contexts */
    struct kinds kinds;                               /* unguarded */
    _Atomic uint64_t refusal_due;                     /* sys_now() from which the next refusal is written; unguarded */
    CUmemoryPool current_pools[MEMORY_CURRENT_POOLS]; /* by device: its current pool; NULL: not known */
    uint32_t pools_chosen;                            /* number of calls so far that may have changed the current pool
                                                         of a device */
    struct lock limit_lock; /* held by the wrapper of cuCtxSetLimit, which reads the limit, charges its memory and sets
                               it; taken before the lock of struct gpus */
};

/* NULL before the first CUDA call of the program. A fork zeroes struct memory in the child. */
extern struct memory *_Atomic the_memory;

static inline struct memory *memory_state(void) {
    return atomic_load_explicit(&the_memory, memory_order_relaxed);
}

/* Take the lock of struct gpus, which also guards struct memory. */
static inline void memory_lock(void) {
    lock(&memory_state()->gpus->lock);
}

static inline void memory_unlock(void) {
    unlock(&memory_state()->gpus->lock);
}

/* Round up to a multiple of `step`. If the result would exceed 64 bits, return the largest such multiple, which is more
 * than any GPU has. */
static inline uint64_t memory_rounded(uint64_t bytes, uint64_t step) {
    return bytes > UINT64_MAX - step ? UINT64_MAX / step * step : (bytes + step - 1) / step * step;
}

#endif
