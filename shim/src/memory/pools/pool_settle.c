/* Reads the driver's byte counts of pools, adjusts their charges, and destroys pools. Counts are read without the lock,
 * because no driver call is made while the lock is held (C4).
 *
 * During a read, `readers` is incremented. A pool is destroyed only once `readers` is 0 (C9).
 */
#include "memory/pools/pool_memory.h"

#include "driver/entries.h"
#include "driver/own_calls.h"
#include "memory/state.h"
#include "memory/credits.h"

/* Time between two checks of the driver's byte counts, and so the longest time until the hook sees that a pool shrank
 * on its own. A check costs a few driver calls per pool. */
#define POOL_LOOK_NS SYS_SECOND

/* Get the driver's byte count of a pool, in bytes: in use if `used`, else reserved. `pool` NULL: of the device's graph
 * pool. Invalidates no stream capture. */
static bool figure(CUmemoryPool pool, CUdevice device, bool used, uint64_t *bytes) {
    CUresult result = CUDA_ERROR_NOT_FOUND;
    cuuint64_t value = 0;
    CUstreamCaptureMode mode = own_calls_begin();
    if (pool != NULL && HAS(cuMemPoolGetAttribute))
        result = DRIVER(cuMemPoolGetAttribute)(
            pool, used ? CU_MEMPOOL_ATTR_USED_MEM_CURRENT : CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &value);
    else if (pool == NULL && HAS(cuDeviceGetGraphMemAttribute))
        result = DRIVER(cuDeviceGetGraphMemAttribute)(
            device, used ? CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT : CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &value);
    own_calls_end(mode);
    *bytes = value;
    return result == CUDA_SUCCESS;
}

bool pool_figure(const struct pool_memory *memory, bool used, uint64_t *bytes) {
    return figure(memory->pool, memory->device, used, bytes);
}

bool pool_trim(struct pool_memory *memory) {
    uint64_t before, after;
    CUstreamCaptureMode mode = own_calls_begin();
    bool known = pool_figure(memory, false, &before);
    if (memory->pool == NULL && HAS(cuDeviceGraphMemTrim))
        DRIVER(cuDeviceGraphMemTrim)(memory->device);
    else if (memory->pool != NULL && HAS(cuMemPoolTrimTo))
        DRIVER(cuMemPoolTrimTo)(memory->pool, 0);
    bool less = pool_figure(memory, false, &after) && known && after < before;
    own_calls_end(mode);
    if (less) {
        memory_lock();
        memory->trims++;
        memory_unlock();
        pool_settle(memory);
    }
    return less;
}

bool pool_read(struct pool_memory *memory, uint32_t *calls, uint64_t *now) {
    memory_lock();
    CUmemoryPool pool = memory->pool;
    bool there = memory->state == POOL_LIVE || memory->state == POOL_LINGERING;
    if (there) /* C9: the pool is not destroyed during the read */
        atomic_fetch_add(&memory->readers, 1);
    *calls = memory->calls;
    memory_unlock();
    if (!there)
        return false;
    if (!figure(pool, memory->device, false, now))
        *now = 0;
    if (atomic_fetch_sub(&memory->readers, 1) == 1)
        sys_wake_all(&memory->readers);
    return true;
}

/* Lower `counted` to the driver's byte count plus the possible growth of calls under way. Return the difference. The
 * caller holds the lock. */
static uint64_t lower(struct pool_memory *memory, uint64_t now) {
    uint64_t most = now + memory->pending, less = memory->counted > most ? memory->counted - most : 0;
    memory->counted -= less;
    return less;
}

uint64_t pool_lower(struct pool_memory *memory, uint32_t calls, uint64_t now) {
    return memory->calls != calls || memory->alone ? 0 : lower(memory, now);
}

void pool_settle_alone(struct pool_memory *memory) {
    uint32_t calls;
    uint64_t now;
    if (!pool_read(memory, &calls, &now))
        return;
    memory_lock();
    uint64_t less = memory->calls == calls ? lower(memory, now) : 0;
    memory_unlock();
    credits_return(memory->place, less);
}

void pool_settle(struct pool_memory *memory) {
    uint32_t calls;
    uint64_t now, more = 0;
    if (!pool_read(memory, &calls, &now))
        return;
    memory_lock();
    int place = memory->place;
    uint64_t less = pool_lower(memory, calls, now);
    if (memory->calls == calls && memory->busy == 0 && now > memory->counted) {
        more = now - memory->counted;
        memory->counted = now;
    }
    memory_unlock();
    credits_return(place, less);
    credits_grow(place, more);
}

/* Change a pool's state from `from` to POOL_ENDING, and wait until no thread reads its byte counts (C9). Return false
 * if its state is not `from`. */
static bool claim(struct pool_memory *memory, enum pool_state from) {
    memory_lock();
    bool claimed = memory->state == from;
    if (claimed)
        memory->state = POOL_ENDING;
    memory_unlock();
    for (uint32_t readers; claimed && (readers = atomic_load(&memory->readers)) > 0;)
        sys_wait(&memory->readers, readers, SYS_MS);
    return claimed;
}

static void go_on_as(struct pool_memory *memory, enum pool_state state) {
    memory_lock();
    memory->state = state;
    memory_unlock();
}

/* Trim a claimed pool. Return true if it has reserved no memory. For a pool that cannot be trimmed, return true if no
 * memory is in use (C11).
 */
static bool empty(const struct pool_memory *memory) {
    uint64_t left = 0;
    if (HAS(cuMemPoolTrimTo))
        DRIVER(cuMemPoolTrimTo)(memory->pool, 0);
    return !pool_figure(memory, memory->origin == POOL_SHAREABLE, &left) || left == 0;
}

/* Destroy a claimed pool. If the driver refuses, the pool's state becomes `before` again. */
static CUresult destroy(struct pool_memory *memory, enum pool_state before) {
    uint64_t counted = 0;
    CUresult result = DRIVER(cuMemPoolDestroy)(memory->pool);
    pool_current_changed();
    memory_lock();
    memory->state = before;
    if (result == CUDA_SUCCESS) {
        counted = memory->counted;
        memory->counted = 0;
        memory->pool = NULL;
        memory->calls++;
        memory->state = POOL_VACANT;
    }
    memory_unlock();
    credits_return(memory->place, counted);
    return result;
}

/* Prepare a pool that the hook destroys later: set its release threshold to 0, so that it keeps no unused memory. If it
 * is the device's current pool, make the default pool current, as the driver does when a current pool is destroyed. */
static void put_away(const struct pool_memory *memory) {
    CUmemoryPool present;
    uint64_t none = 0;
    DRIVER(cuMemPoolSetAttribute)(memory->pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &none);
    if (DRIVER(cuDeviceGetMemPool)(&present, memory->device) == CUDA_SUCCESS && present == memory->pool &&
        DRIVER(cuDeviceGetDefaultMemPool)(&present, memory->device) == CUDA_SUCCESS)
        DRIVER(cuDeviceSetMemPool)(memory->device, present);
    pool_current_changed();
}

CUresult pool_destroy(struct pool_memory *memory) {
    CUresult result = CUDA_SUCCESS;
    if (!claim(memory, POOL_LIVE))
        return CUDA_ERROR_INVALID_VALUE;
    CUstreamCaptureMode mode = own_calls_begin();
    if (memory->place < 0 || empty(memory)) {
        result = destroy(memory, POOL_LIVE);
    } else {
        put_away(memory);
        go_on_as(memory, POOL_LINGERING);
    }
    own_calls_end(mode);
    return result;
}

/* Destroy a lingering pool if it is empty. */
static void finish(struct pool_memory *memory) {
    if (!claim(memory, POOL_LINGERING))
        return;
    CUstreamCaptureMode mode = own_calls_begin();
    if (!empty(memory) || destroy(memory, POOL_LINGERING) != CUDA_SUCCESS)
        go_on_as(memory, POOL_LINGERING);
    own_calls_end(mode);
}

/* Return the next pool of a GPU (-1: of any GPU of the tenant), and the bytes counted for it; NULL: there is none. */
static struct pool_memory *next_of(const struct pool_memory *after, int place, uint64_t *counted) {
    memory_lock();
    struct pool_memory *memory = after != NULL ? after->next : memory_state()->pools;
    while (memory != NULL && (memory->place < 0 || (place >= 0 && memory->place != place)))
        memory = memory->next;
    *counted = memory != NULL ? memory->counted : 0;
    memory_unlock();
    return memory;
}

bool pools_refresh(int place) {
    bool less = false;
    uint64_t before;
    for (struct pool_memory *at = next_of(NULL, place, &before); at != NULL; at = next_of(at, place, &before)) {
        finish(at);
        pool_settle(at);
        memory_lock();
        less |= at->counted < before;
        memory_unlock();
    }
    return less;
}

uint64_t pools_step(uint64_t now) {
    struct memory *all = memory_state();
    memory_lock();
    bool watched = all->pools_watched;
    memory_unlock();
    if (!watched || now < all->pools_next_look)
        return watched ? all->pools_next_look : SYS_NEVER;
    pools_refresh(-1);
    memory_lock();
    watched = false;
    for (const struct pool_memory *memory = all->pools; memory != NULL; memory = memory->next)
        watched |= memory->counted > 0 || memory->busy > 0 || memory->state == POOL_LINGERING;
    all->pools_watched = watched;
    memory_unlock();
    all->pools_next_look = now + POOL_LOOK_NS;
    return watched ? all->pools_next_look : SYS_NEVER;
}
