/* Memory that the driver reserves on its own: memory pools, and the graph pool of each device.
 *
 * The graph pool of a device is the memory that cuGraphLaunch reserves for graphs with memory nodes, and keeps for the
 * next graph.
 *
 * Guarantees:
 * C7 reserved-counts: a pool counts with the bytes that it has reserved on the device, used or not, by the driver's
 *    byte count.
 * C8 growth-charged-first: before a call that may make a pool grow, the expected growth is charged (C1,
 *    memory/state.h). If the charge is refused, the call is made only if unused memory of the pool can serve it. It
 *    then has exclusive use of the pool, so that no other call takes this memory.
 * C9 no-read-while-ending: the hook makes no driver call about a pool that is being destroyed.
 * C10 shrinking-is-seen: after a pool has returned memory to the device, the memory stops counting at the next of these
 *     events: a call of the pool, a query of free memory, a recall of credits, or a check every POOL_LOOK_NS.
 * C11 shareable-never-shrinks: by CUDA's documentation, a pool that other processes can import returns no memory before
 *     its end. It has no trim and no release threshold. So it may grow only within the limit:
 *    - If the charge of the whole expected growth is refused, the call may use only memory that the pool already has.
 *    - A call that made the pool grow over the limit cannot be undone. After it, no call may grow the pool until the
 *      agent has granted bytes for the pool again.
 *    - The pool is destroyed once none of its memory is in use.
 *
 * pool_registry.c registers the pools, pool_settle.c reads the driver's byte counts, pool_calls.c wraps calls.
 */
#ifndef SHAREPOD_POOL_MEMORY_H
#define SHAREPOD_POOL_MEMORY_H

#include <cuda.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/sys.h"

enum pool_state {
    POOL_LIVE,
    POOL_LINGERING, /* the program has destroyed it while it had allocations; the hook destroys it once it is empty
                     */
    POOL_ENDING,    /* the hook is destroying it with a driver call (C9) */
    POOL_VACANT     /* destroyed; its entry stays in the list and is used for the next pool */
};

enum pool_origin {
    POOL_FOUND,     /* not created by the program, or its creation was not seen: a device's default pool, or its graph
                       pool */
    POOL_MADE,      /* created by the program */
    POOL_SHAREABLE, /* created by the program for sharing with other processes: the driver keeps its memory until it is
                       destroyed (C11) */
    POOL_ELSEWHERE  /* a pool of host memory, or one imported from another process: not counted in this process */
};

/* A pool, or the graph pool of a device. Guarded by the lock of struct gpus, except where noted. Entries are never
 * freed, so a pointer to an entry stays valid. */
struct pool_memory {
    struct pool_memory *next;
    CUmemoryPool pool; /* NULL: the graph pool of the device */
    CUdevice device;
    int place; /* place of its GPU in struct gpus; -1: not a GPU of the tenant, or host memory */
    enum pool_origin origin;
    enum pool_state state;
    _Atomic uint32_t readers; /* number of threads that read the driver's byte counts now, without the lock (C9) */
    uint32_t charging;      /* number of calls that are charging their expected growth, or have charged it and are about
                               to begin */
    uint32_t busy;          /* number of calls under way */
    _Atomic uint32_t calls; /* number of changes so far: calls begun and ended, charges ended. Also the futex of threads
                               that wait for such a change */
    bool alone;             /* one call has exclusive use of the pool (C8) */
    bool awaited;           /* a thread waits for a call to end */
    bool overgrown;         /* the pool grew over the limit in a call that could not be undone (C11) */
    uint32_t trims;         /* number of trims so far that the hook knows */
    uint64_t counted;       /* bytes charged for the pool */
    uint64_t pending;       /* part of `counted` that was charged for calls under way */
    uint64_t most;          /* bytes: maximum that the program has set for the pool; 0: none */
    uint64_t refused_until; /* sys_now() until which no request is sent to the agent for this pool */
};

/* One call that may make a pool grow, from pool_call_begin to pool_call_end. */
struct pool_call {
    struct pool_memory *memory; /* pool that may grow; NULL: the hook counts nothing, so only the driver can refuse */
    uint64_t bytes;             /* bytes of the request */
    uint64_t reserved;          /* bytes charged for the call before it was made */
    uint64_t before;            /* bytes that the pool had reserved before the call; only if `learns` */
    uint32_t calls;             /* memory->calls at the beginning of this call */
    bool charging;              /* the call is one of memory->charging */
    bool alone;                 /* the call has exclusive use of the pool (C8) */
    bool learns;                /* learn the step in which the driver grows pools from the growth by this call */
};

/* How likely the pool can serve a call from memory that it already has, so that the call may be made without a charge.
 */
enum pool_reuse {
    REUSE_UNKNOWN, /* not known: only if the driver counts as many unused bytes as the call requests */
    REUSE_LIKELY,  /* this graph was launched before: it is enough that the pool has as many bytes, used or unused */
    REUSE_SURE     /* this graph was launched before, and the pool was not trimmed since: no check */
};

/* pool_registry.c */

/* Register a pool, unless it is registered, and return its entry; NULL: host memory is exhausted. `most`: maximum of
 * the pool in bytes; 0: none. */
struct pool_memory *pool_register(CUmemoryPool pool, CUdevice device, enum pool_origin origin, uint64_t most);
/* Register the graph pool of a device, unless it is registered, and return its entry; NULL: host memory is exhausted.
 */
struct pool_memory *graph_pool_register(CUdevice device);
/* Return the next graph pool after `after`; `after` NULL: the first one. Return NULL after the last one. */
struct pool_memory *graph_pool_next(const struct pool_memory *after);
/* Return whether a graph of the process may have memory nodes. Costs one load. */
bool graph_pool_any(void);
/* Return the entry of a pool, registered if necessary: for its device if the driver reports it, else for `device`.
 * Return NULL for a pool of host memory. */
struct pool_memory *pool_find(CUmemoryPool pool, CUdevice device);
/* Return the entry of a pool that the program has created or imported; NULL for any other pool. */
struct pool_memory *pool_find_made(CUmemoryPool pool);

/* Return the driver's current pool of a device; NULL: none. */
CUmemoryPool pool_current(CUdevice device);
/* Drop the stored current pools. Call this after each call that may change a current pool. */
void pool_current_changed(void);

/* pool_calls.c */

/* Before a call that may allocate `bytes` bytes: charge the expected growth of the pool (C8). May wait for the agent
 * and for other calls of the pool. Return false if the limit does not allow the bytes. */
bool pool_call_begin(struct pool_call *call, struct pool_memory *memory, uint64_t bytes, enum pool_reuse may_reuse);
/* After the call: charge the pool's growth beyond the bytes that pool_call_begin has charged. Return false if the limit
 * does not allow it. The caller must then undo the call if it can, and call pool_call_close. */
bool pool_call_end(struct pool_call *call);
/* End a call after pool_call_end has returned false. The pool's growth is charged even over the limit (C5,
 * memory/state.h). */
void pool_call_close(struct pool_call *call);

/* pool_settle.c */

/* Adjust the pool's charge to the bytes that it has reserved, by the driver's present byte count. A larger count is
 * charged only while no call is under way, and then even over the limit (C5). */
void pool_settle(struct pool_memory *memory);
/* Return charged bytes that the pool has not reserved. Called for a call that has exclusive use of the pool. */
void pool_settle_alone(struct pool_memory *memory);
/* Destroy a pool of the program. A pool with allocations left lingers, and is counted, until it is empty. Return the
 * driver's answer. */
CUresult pool_destroy(struct pool_memory *memory);
/* Get the driver's byte count of a pool in bytes: the bytes in use if `used`, else the reserved bytes. Return false if
 * the driver does not report it. */
bool pool_figure(const struct pool_memory *memory, bool used, uint64_t *bytes);
/* Return the pool's unused memory to the device. Return whether the pool shrank. */
bool pool_trim(struct pool_memory *memory);
/* Get the driver's byte count of reserved bytes (`*now`), and memory->calls before the read (`*calls`). Return false if
 * the pool has ended or is ending (C9). */
bool pool_read(struct pool_memory *memory, uint32_t *calls, uint64_t *now);
/* Lower `counted` to the driver's byte count plus the possible growth of calls under way, and return the difference. Do
 * nothing and return 0 if a call began or ended after the count was read. The same applies if a call has exclusive use
 * of the pool: that call updates `counted` itself. The caller holds the lock. */
uint64_t pool_lower(struct pool_memory *memory, uint32_t calls, uint64_t now);
/* Call pool_settle for all pools of a GPU (-1: of every GPU), and destroy lingering pools that are empty. Return
 * whether bytes were freed. */
bool pools_refresh(int place);
/* Call pools_refresh for all GPUs every POOL_LOOK_NS while any pool is in use. Return the time of the next call. Only
 * the hook thread calls this. */
uint64_t pools_step(uint64_t now);

#endif
