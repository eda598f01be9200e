/* See growing.h. Which there are stands in growers.c, the calls that let them grow in growth.c. */
#include "memory/pool_memory.h"

#include "driver/entries.h"
#include "driver/own_calls.h"
#include "memory/lock.h"
#include "memory/credits.h"

#define GROWING_LOOK SYS_SECOND

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

bool growing_figure(const struct growing *growing, bool used, uint64_t *bytes) {
    return figure(growing->pool, growing->device, used, bytes);
}

bool growing_trim(struct growing *growing) {
    uint64_t before, after;
    CUstreamCaptureMode mode = own_calls_begin();
    bool known = growing_figure(growing, false, &before);
    if (growing->pool == NULL && HAS(cuDeviceGraphMemTrim))
        DRIVER(cuDeviceGraphMemTrim)(growing->device);
    else if (growing->pool != NULL && HAS(cuMemPoolTrimTo))
        DRIVER(cuMemPoolTrimTo)(growing->pool, 0);
    bool less = growing_figure(growing, false, &after) && known && after < before;
    own_calls_end(mode);
    if (less) {
        books_lock();
        growing->trims++;
        books_unlock();
        growing_settle(growing);
    }
    return less;
}

bool growing_read(struct growing *growing, uint32_t *calls, uint64_t *now) {
    books_lock();
    CUmemoryPool pool = growing->pool;
    bool there = growing->state == GROWING_LIVE || growing->state == GROWING_LEFT;
    if (there) /* it is not destroyed meanwhile */
        atomic_fetch_add(&growing->readers, 1);
    *calls = growing->calls;
    books_unlock();
    if (!there)
        return false;
    if (!figure(pool, growing->device, false, now))
        *now = 0;
    if (atomic_fetch_sub(&growing->readers, 1) == 1)
        sys_wake_all(&growing->readers);
    return true;
}

uint64_t growing_lower(struct growing *growing, uint32_t calls, uint64_t now) {
    if (growing->calls != calls || growing->alone)
        return 0;
    uint64_t most = now + growing->pending, less = growing->counted > most ? growing->counted - most : 0;
    growing->counted -= less;
    return less;
}

void growing_settle(struct growing *growing) {
    uint32_t calls;
    uint64_t now, more = 0;
    if (!growing_read(growing, &calls, &now))
        return;
    books_lock();
    int place = growing->place;
    uint64_t less = growing_lower(growing, calls, now);
    if (growing->calls == calls && growing->busy == 0 && now > growing->counted) {
        more = now - growing->counted;
        growing->counted = now;
    }
    books_unlock();
    credits_return(place, less);
    credits_grow(place, more);
}

/* From one state to ENDING, once nobody reads its figures any more; false if another was faster. */
static bool claim(struct growing *growing, enum growing_state from) {
    books_lock();
    bool claimed = growing->state == from;
    if (claimed)
        growing->state = GROWING_ENDING;
    books_unlock();
    for (uint32_t readers; claimed && (readers = atomic_load(&growing->readers)) > 0;)
        sys_wait(&growing->readers, readers, SYS_MS);
    return claimed;
}

static void go_on_as(struct growing *growing, enum growing_state state) {
    books_lock();
    growing->state = state;
    books_unlock();
}

/* What is claimed: whether nothing is left in it, after a trim. */
static bool empty(const struct growing *growing) {
    uint64_t reserved = 0;
    if (HAS(cuMemPoolTrimTo))
        DRIVER(cuMemPoolTrimTo)(growing->pool, 0);
    return !growing_figure(growing, false, &reserved) || reserved == 0;
}

/* What is claimed ends; if the driver will not have it, it is as before. */
static CUresult destroy(struct growing *growing, enum growing_state before) {
    uint64_t counted = 0;
    CUresult result = DRIVER(cuMemPoolDestroy)(growing->pool);
    books_lock();
    growing->state = before;
    if (result == CUDA_SUCCESS) {
        counted = growing->counted;
        growing->counted = 0;
        growing->pool = NULL;
        growing->calls++;
        growing->state = GROWING_VACANT;
    }
    books_unlock();
    credits_return(growing->place, counted);
    return result;
}

/* The device's current pool is the default one again, as it is when the current one is destroyed. */
static void put_away(const struct growing *growing) {
    CUmemoryPool present;
    uint64_t none = 0;
    DRIVER(cuMemPoolSetAttribute)(growing->pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &none);
    if (DRIVER(cuDeviceGetMemPool)(&present, growing->device) == CUDA_SUCCESS && present == growing->pool &&
        DRIVER(cuDeviceGetDefaultMemPool)(&present, growing->device) == CUDA_SUCCESS)
        DRIVER(cuDeviceSetMemPool)(growing->device, present);
}

CUresult growing_destroy(struct growing *growing) {
    CUresult result = CUDA_SUCCESS;
    if (!claim(growing, GROWING_LIVE))
        return CUDA_ERROR_INVALID_VALUE;
    CUstreamCaptureMode mode = own_calls_begin();
    if (growing->place < 0 || empty(growing)) {
        result = destroy(growing, GROWING_LIVE);
    } else {
        put_away(growing);
        go_on_as(growing, GROWING_LEFT);
    }
    own_calls_end(mode);
    return result;
}

/* Of a pool that the program has destroyed: if it is empty by now it goes. */
static void finish(struct growing *growing) {
    if (!claim(growing, GROWING_LEFT))
        return;
    CUstreamCaptureMode mode = own_calls_begin();
    if (!empty(growing) || destroy(growing, GROWING_LEFT) != CUDA_SUCCESS)
        go_on_as(growing, GROWING_LEFT);
    own_calls_end(mode);
}

/* The next of a GPU (-1: of any), and what is counted for it; NULL after the last. */
static struct growing *next_of(const struct growing *after, int place, uint64_t *counted) {
    books_lock();
    struct growing *growing = after != NULL ? after->next : books()->growing;
    while (growing != NULL && (growing->place < 0 || (place >= 0 && growing->place != place)))
        growing = growing->next;
    *counted = growing != NULL ? growing->counted : 0;
    books_unlock();
    return growing;
}

bool growing_refresh(int place) {
    bool less = false;
    uint64_t before;
    for (struct growing *at = next_of(NULL, place, &before); at != NULL; at = next_of(at, place, &before)) {
        finish(at);
        growing_settle(at);
        books_lock();
        less |= at->counted < before;
        books_unlock();
    }
    return less;
}

uint64_t growing_step(uint64_t now) {
    struct memory *all = books();
    books_lock();
    bool watched = all->growing_watched;
    books_unlock();
    if (!watched || now < all->next_look)
        return watched ? all->next_look : SYS_NEVER;
    growing_refresh(-1);
    books_lock();
    watched = false;
    for (const struct growing *growing = all->growing; growing != NULL; growing = growing->next)
        watched |= growing->counted > 0 || growing->busy > 0 || growing->state == GROWING_LEFT;
    all->growing_watched = watched;
    books_unlock();
    all->next_look = now + GROWING_LOOK;
    return watched ? all->next_look : SYS_NEVER;
}
