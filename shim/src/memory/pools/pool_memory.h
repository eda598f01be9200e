/* Memory that the driver takes and gives back by itself: memory pools, and what a device keeps for graphs.
 *
 * What counts is what is reserved of the device, used or not. Guarantees: before a call that may let it grow, as much
 * as it may grow by is reserved, or, where that is not to be had, the call is made only if what is reserved already
 * could serve it; afterwards the driver's own figure counts. What it shrinks by is noticed with the next call, when the
 * program asks how much is free, when the agent wants credits back, and each POOL_LOOK_NS.
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
    POOL_LINGERING, /* destroyed by the program while allocations of it were left: the hook does it when it is empty */
    POOL_ENDING,    /* the driver is being asked to destroy it: nobody else asks it for anything */
    POOL_VACANT     /* nothing any more: its place in the list stays, for the next */
};

enum pool_origin {
    POOL_FOUND,    /* there without the program: a device's default pool, what it keeps for graphs */
    POOL_MADE,     /* by the program */
    POOL_ELSEWHERE /* of host memory, or of another process: nothing of it counts here */
};

struct pool_memory {
    struct pool_memory *next;
    CUmemoryPool pool; /* NULL: what the device keeps for graphs */
    CUdevice device;
    int place; /* of its GPU; -1: none of the tenant's, or no GPU's memory */
    enum pool_origin origin;
    enum pool_state state;
    _Atomic uint32_t readers; /* of the driver's figures, without the lock */
    uint32_t busy;            /* calls under way */
    _Atomic uint32_t calls;   /* calls begun and ended */
    bool alone;               /* one call has it for itself: it has to make do with what is reserved */
    bool awaited;             /* somebody waits for a call to end */
    uint32_t trims;           /* of what the device keeps for graphs */
    uint64_t counted;         /* bytes of credits in use for it */
    uint64_t pending;         /* of these, what was reserved for calls under way */
    uint64_t most;            /* that the program lets it grow to; 0: as the driver likes */
    uint64_t refused_until;
};

/* A call on its way. */
struct pool_call {
    struct pool_memory *memory;
    uint64_t reserved, bytes;
    bool alone;      /* nothing was reserved for it: no other call is under way */
    bool learns;     /* what it grows by says in what steps the driver grows pools */
    uint64_t before; /* the driver's figure before the call */
    uint32_t calls;
};

/* Those that are known, made known if need be; NULL when the kernel gives no memory. */
struct pool_memory *pool_register(CUmemoryPool pool, CUdevice device, enum pool_origin origin, uint64_t most);
struct pool_memory *graph_pool_register(CUdevice device);
/* The next that stands for a device's graphs; `after` NULL: the first. */
struct pool_memory *graph_pool_next(const struct pool_memory *after);
/* A pool that is known already, or becomes so: of the device that the driver says it is of, else of `device`. NULL for
 * one of host memory. */
struct pool_memory *pool_find(CUmemoryPool pool, CUdevice device);
/* The one that the program made, or imported, under that handle; NULL if it is none. */
struct pool_memory *pool_find_made(CUmemoryPool pool);
bool graph_pool_any(void);

enum pool_reuse {
    REUSE_UNKNOWN, /* if the driver's figures say that it has enough that is unused */
    REUSE_LIKELY,  /* and where it has no less than that, used or not */
    REUSE_SURE
};

/* Before a call that may take `bytes` more; false: they are not to be had. `may_reuse`: whether what it has already may
 * serve the call where nothing more is to be had. */
bool pool_call_begin(struct pool_call *call, struct pool_memory *memory, uint64_t bytes, enum pool_reuse may_reuse);
/* After the call. False: it took more than there was; then the call is undone, if it can be, and pool_call_close
 * follows.
 */
bool pool_call_end(struct pool_call *call);
/* Counts what was taken, whatever the limit. */
void pool_call_close(struct pool_call *call);
/* Counts what the driver says now; more than before, whatever the limit, only while no call is under way. */
void pool_settle(struct pool_memory *memory);
/* The program destroys a pool that it made. What is allocated of it stays counted, and the driver is asked to destroy
 * it when it is empty. */
CUresult pool_destroy(struct pool_memory *memory);

/* Between memory.c and call.c. */

/* The driver's figures; false if it has none, as for a pool that is gone. */
bool pool_figure(const struct pool_memory *memory, bool used, uint64_t *bytes);
/* Gives back to the device what of it nothing uses; whether that was anything. */
bool pool_trim(struct pool_memory *memory);
/* The driver's figure and the calls that were begun and ended before it was read; false: the pool is gone. */
bool pool_read(struct pool_memory *memory, uint32_t *calls, uint64_t *now);
/* Counts no more than the driver's figure and what calls under way may yet take; nothing if calls began or ended since
 * that was read, or if one relies on it: they look themselves. Returns what is no longer counted. With the lock. */
uint64_t pool_lower(struct pool_memory *memory, uint32_t calls, uint64_t now);

/* Looks at all of a GPU (-1: of every one); whether anything went back. */
bool pools_refresh(int place);
/* For the hook thread; when it wants to be called again. */
uint64_t pools_step(uint64_t now);

#endif
