/* Memory that the driver reserves on its own: pools and the per-device graph pool.
 *
 * The graph pool of a device is the memory that cuGraphLaunch reserves for graphs with memory nodes, and keeps for the
 * next graph.
 *
 * Guarantees:
 * C7 reserved-counts: a pool counts with the bytes that it has reserved of the device, used or not, by the driver's own
 *    figure.
 * C8 growth-charged-first: before a call that may make a pool grow, the expected growth is charged (C1). If the charge
 *    is refused, the call is made only if memory of the pool could serve it. Then no other call of the pool is under
 *    way, so that none takes that memory.
 * C9 no-read-while-ending: the hook makes no driver call about a pool that is being destroyed.
 * C10 shrinking-is-seen: memory that a pool has returned to the device stops counting with the next call, when the
 *    program queries free memory, when the agent recalls credits, and every POOL_LOOK_NS.
 * C11 shareable-never-shrinks: CUDA documents that a pool which other processes can import returns no memory before its
 *    end: it has no trim and no release threshold. So it may grow only within the limit:
 *    - if the whole expected step is refused, calls may use only memory that the pool has;
 *    - after a call that made the pool grow nevertheless, which cannot be undone, no call may grow it until the agent
 *      has granted bytes for it again;
 *    - the pool is destroyed once none of its memory is in use.
 *
 * pool_registry.c registers the pools, pool_settle.c reads the driver's figures, pool_calls.c wraps calls.
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
    POOL_LINGERING, /* destroyed by the program with allocations left; the hook destroys it when it is empty */
    POOL_ENDING,    /* the driver is being asked to destroy it (C9) */
    POOL_VACANT     /* destroyed; its entry stays in the list, for the next pool */
};

enum pool_origin {
    POOL_FOUND,     /* there without the program: a device's default pool, its graph pool */
    POOL_MADE,      /* made by the program */
    POOL_SHAREABLE, /* the same, and other processes can import it: the driver keeps its memory until its end (C11) */
    POOL_ELSEWHERE  /* of host memory, or of another process: nothing of it counts here */
};

/* A pool, or the graph pool of a device. With the lock of struct gpus, except for marked fields. Entries are never
 * freed, so that a pointer to one stays valid. */
struct pool_memory {
    struct pool_memory *next;
    CUmemoryPool pool; /* NULL: the graph pool of the device */
    CUdevice device;
    int place; /* of its GPU in struct gpus; -1: not a GPU of the tenant, or not a GPU's memory */
    enum pool_origin origin;
    enum pool_state state;
    _Atomic uint32_t readers; /* threads that read the driver's figures now, without the lock (C9) */
    uint32_t busy;            /* calls under way */
    _Atomic uint32_t calls;   /* calls begun plus calls ended; a futex for the threads that wait for an end */
    bool alone;               /* one call has exclusive use of the pool: nothing was charged for it (C8) */
    bool awaited;             /* a thread waits for a call to end */
    bool overgrown;           /* grew beyond the limit in a call that could not be undone (C11) */
    uint32_t trims;           /* how often the hook saw the graph pool trimmed */
    uint64_t counted;         /* bytes of credits in use for it */
    uint64_t seen;            /* bytes: the driver's figure after the last call */
    uint64_t pending;         /* bytes of `counted` that were charged for calls under way */
    uint64_t most;            /* bytes: the program's own maximum of the pool; 0: no maximum */
    uint64_t refused_until;   /* sys_now() until which the agent is not asked again */
};

/* One call that may make a pool grow, from pool_call_begin to pool_call_end. */
struct pool_call {
    struct pool_memory *memory; /* NULL: nothing is counted, only the driver decides */
    uint64_t bytes;             /* bytes of the request */
    uint64_t reserved;          /* bytes charged for it before it was made */
    uint64_t before;            /* the driver's figure before the call; only if `learns` */
    uint32_t calls;             /* memory->calls when this call had begun */
    bool alone;                 /* nothing is charged for it: it has exclusive use of the pool (C8) */
    bool learns;                /* its growth shows in what steps the driver grows pools */
};

/* How sure it is that memory which the pool has already can serve a call. */
enum pool_reuse {
    REUSE_UNKNOWN, /* only if as many bytes are unused by the driver's figures */
    REUSE_LIKELY,  /* also if the pool has as many bytes, used or not: this graph was launched before */
    REUSE_SURE     /* this graph was launched before, and nothing was trimmed since */
};

/* pool_registry.c */

/* Register a pool, unless it is known, and return it. `most`: bytes, its maximum, 0: none. NULL when the kernel gives
 * no memory. */
struct pool_memory *pool_register(CUmemoryPool pool, CUdevice device, enum pool_origin origin, uint64_t most);
/* Register the graph pool of a device, unless it is known, and return it. NULL when the kernel gives no memory. */
struct pool_memory *graph_pool_register(CUdevice device);
/* Return the graph pool after this one; `after` NULL: the first. */
struct pool_memory *graph_pool_next(const struct pool_memory *after);
/* Return whether the process may have graphs with memory nodes. One load. */
bool graph_pool_any(void);
/* Return a pool. Register an unknown one for its device by the driver, else for `device`. NULL for a pool of host
 * memory. */
struct pool_memory *pool_find(CUmemoryPool pool, CUdevice device);
/* Return a pool that the program made or imported; NULL: it did neither. */
struct pool_memory *pool_find_made(CUmemoryPool pool);

/* Return the current pool of a device, as the driver has it; NULL: none. */
CUmemoryPool pool_current(CUdevice device);
/* Forget which pools are current ones: after each call that may change that. */
void pool_current_changed(void);

/* pool_calls.c */

/* Charge a call that may take `bytes` more, before it is made (C8). May wait for the agent and for other calls. False:
 * the limit does not allow it. */
bool pool_call_begin(struct pool_call *call, struct pool_memory *memory, uint64_t bytes, enum pool_reuse may_reuse);
/* Charge further growth, after the call. False: the limit does not allow it; the caller must undo the call if it can,
 * and then call pool_call_close. */
bool pool_call_end(struct pool_call *call);
/* End a call whose pool_call_end was refused: its growth is charged whatever the limit (C5). */
void pool_call_close(struct pool_call *call);

/* pool_settle.c */

/* Count the driver's present figure. Growth is counted, whatever the limit (C5), only while no call is under way. */
void pool_settle(struct pool_memory *memory);
/* Destroy a pool for the program that made it. A pool with allocations left lingers, counted, until it is empty.
 * Returns the driver's answer. */
CUresult pool_destroy(struct pool_memory *memory);
/* Get the driver's figure of a pool: bytes in use if `used`, else bytes reserved. False: the driver has none. */
bool pool_figure(const struct pool_memory *memory, bool used, uint64_t *bytes);
/* Give the pool's unused memory back to the device. True if that was something. */
bool pool_trim(struct pool_memory *memory);
/* Get the driver's figure of reserved bytes (`now`), and memory->calls from before the read. False: the pool has ended
 * or is ending (C9). */
bool pool_read(struct pool_memory *memory, uint32_t *calls, uint64_t *now);
/* Lower `counted` to the driver's figure plus the possible growth of calls under way; return the difference. No effect
 * if a call began or ended since the figure was read, or has exclusive use of the pool: that call settles itself. With
 * the lock. */
uint64_t pool_lower(struct pool_memory *memory, uint32_t calls, uint64_t now);
/* Settle all pools of a GPU (-1: of every GPU), and destroy lingering empty ones. True if bytes were freed. */
bool pools_refresh(int place);
/* Settle all pools every POOL_LOOK_NS while any is in use. Returns when to call again. Hook thread only. */
uint64_t pools_step(uint64_t now);

#endif
