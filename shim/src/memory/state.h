/* State of this process's device memory: its allocations, the bytes that its pools have reserved, and the lock of both.
 *
 * Invariants of memory/ and wrappers/memory, cited by name:
 *
 * C1 charged-before-taken: on a GPU whose limit is enforced, the bytes of a call are charged before the driver's call.
 *    If only the driver knows their number (a pitch, a pool), the expected bytes are charged before and the rest right
 *    after. If the rest is refused, the call is undone and fails. So no call returns success over the limit, except a
 *    graph launch, which cannot be undone (C5).
 * C2 failed-call-gives-back: a call that fails, and memory that is freed, returns its whole charge.
 * C3 out-before-free: an allocation leaves the table before the driver frees it, because the driver may assign its name
 *    to another thread at once. If the driver fails to free it, the allocation returns to the table.
 * C4 no-wait-with-lock: the lock is not held during calls of the driver or requests to the agent.
 * C5 growth-is-counted: memory that the driver takes without a refusable call is charged whatever the limit. It is
 *    reported to the agent as soon as the agent reads.
 * C6 idle-goes-back: unused credits are returned to the agent:
 *    - at once beyond CREDITS_IDLE_MOST and the amount that the program allocated again each time;
 *    - when the agent recalls them;
 *    - when the limit is lowered;
 *    - after an idle time of CREDITS_LOOK_NS to twice that.
 *
 * The one struct memory is in struct process. memory_state() is valid once credits_prepare() has run, that is after
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

enum { MEMORY_GRANULARITY = 512 };  /* bytes: the driver rounds every allocation up to a multiple of it */
enum { MEMORY_CURRENT_POOLS = 16 }; /* devices whose current pools are remembered, of others the driver is asked */

/* All fields with the lock of struct gpus, except marked ones. */
struct memory {
    struct gpus *gpus;       /* without the lock */
    struct session *session; /* without the lock */
    /* Counts memory that the driver has freed on its own on a GPU; true if there was any. `wait`: for memory that
     * streams are to free, a second at most. Without the lock. */
    bool (*refresh)(int place, bool wait);
    struct allocation_table allocations;
    struct slab physical_slab, binding_slab, export_slab;
    struct hashed exports_table;
    struct export *exports; /* descriptors that the driver has exported, if they were open when last counted */
    size_t export_count, export_most; /* in the list; count them again before it gets longer */
    size_t export_asked;              /* calls that have asked for a count since the last */
    struct physical *lingering;       /* memory of which nothing but exported descriptors is left */
    uint64_t physical_next_look;      /* sys_now() of their next check; the hook thread's, without the lock */
    _Atomic uint32_t giving_back;     /* threads that have found some closed and are giving their bytes back */
    _Atomic uint32_t given_back;      /* how often that is done; without the lock */
    uint64_t largest_mapping;         /* bytes: the longest mapping that was ever made */
    uint64_t sparse;                  /* mappings into sparse arrays */
    struct pool_memory *pools;        /* all that were ever registered, the newest first */
    struct slab pool_slab;
    bool pools_watched;       /* the hook thread checks the driver's figures regularly */
    uint64_t pool_chunk;      /* bytes: pools grow by multiples of it or of a part of it; 0: none has grown */
    uint64_t pool_surplus;    /* bytes: the most that a pool grew beyond what its call needed; less than its step */
    uint64_t pools_next_look; /* sys_now() of the next check; the hook thread's, without the lock */
    _Atomic bool graph_pools; /* some graph may have memory nodes; without the lock */
    uint32_t contexts[SHP_MAX_GPUS]; /* contexts of this process on each GPU */
    uint64_t overhead[SHP_MAX_GPUS]; /* bytes charged for them */
    struct kinds kinds;              /* without the lock */
    _Atomic uint64_t refusal_due;    /* sys_now() from which a refusal is written again; without the lock */
    CUmemoryPool current_pools[MEMORY_CURRENT_POOLS]; /* by device; NULL: not known */
    uint32_t pools_chosen;                            /* calls that may have made another pool a current one */
    struct lock limit_lock; /* for cuCtxSetLimit, which reads, charges and writes; taken before the other lock */
};

/* NULL before the first CUDA call of the program. Zeroed, as struct process is, in a child of fork. */
extern struct memory *_Atomic the_memory;

static inline struct memory *memory_state(void) {
    return atomic_load_explicit(&the_memory, memory_order_relaxed);
}

/* Take the lock of struct gpus, which is the lock of struct memory too. */
static inline void memory_lock(void) {
    lock(&memory_state()->gpus->lock);
}

static inline void memory_unlock(void) {
    unlock(&memory_state()->gpus->lock);
}

/* Round up to a multiple of `step`. A sum beyond 64 bits gives a multiple that is more than any GPU has. */
static inline uint64_t memory_rounded(uint64_t bytes, uint64_t step) {
    return bytes > UINT64_MAX - step ? UINT64_MAX / step * step : (bytes + step - 1) / step * step;
}

#endif
