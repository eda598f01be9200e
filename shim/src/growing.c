/* See growing.h. Which there are stands in growers.c. */
#include "growing.h"

#include "credits.h"
#include "memory.h"
#include "process.h"

/* What pools were seen to grow by, and the least unit of physical memory. */
#define CHUNK_MOST (32ull << 20)
#define CHUNK_LEAST (2ull << 20)
#define GROWING_LOOK SYS_SECOND
#define REFUSED_TIME (100 * SYS_MS) /* after a refusal memory that is reserved already is used without asking again */

static struct memory *memory(void) {
    return &the_process->memory;
}

static void begin(void) {
    lock(&the_process->gpus.lock);
}

static void end(void) {
    unlock(&the_process->gpus.lock);
}

/* The driver's figures; false if it has none, as for a pool that is gone. */
static bool figure(CUmemoryPool pool, CUdevice device, bool used, uint64_t *bytes) {
    CUresult result = CUDA_ERROR_NOT_FOUND;
    cuuint64_t value = 0;
    CUstreamCaptureMode mode = streams_hide();
    if (pool != NULL && HAS(cuMemPoolGetAttribute))
        result = DRIVER(cuMemPoolGetAttribute)(
            pool, used ? CU_MEMPOOL_ATTR_USED_MEM_CURRENT : CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &value);
    else if (pool == NULL && HAS(cuDeviceGetGraphMemAttribute))
        result = DRIVER(cuDeviceGetGraphMemAttribute)(
            device, used ? CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT : CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &value);
    streams_unhide(mode);
    *bytes = value;
    return result == CUDA_SUCCESS;
}

/* Whether unused memory of it could serve the call. */
static bool could_reuse(const struct growing *growing, uint64_t bytes) {
    uint64_t reserved, used;
    return figure(growing->pool, growing->device, false, &reserved) &&
           figure(growing->pool, growing->device, true, &used) && reserved >= used && reserved - used >= bytes;
}

/* Gives back to the device what of it nothing uses; whether that was anything. */
static bool trim(struct growing *growing) {
    uint64_t before, after;
    CUstreamCaptureMode mode = streams_hide();
    bool known = figure(growing->pool, growing->device, false, &before);
    if (growing->pool == NULL && HAS(cuDeviceGraphMemTrim))
        DRIVER(cuDeviceGraphMemTrim)(growing->device);
    else if (growing->pool != NULL && HAS(cuMemPoolTrimTo))
        DRIVER(cuMemPoolTrimTo)(growing->pool, 0);
    bool less = figure(growing->pool, growing->device, false, &after) && known && after < before;
    streams_unhide(mode);
    if (less) {
        begin();
        growing->trims++;
        end();
        growing_settle(growing);
    }
    return less;
}

/* What the driver is expected to grow it by. With the lock. */
static uint64_t step(const struct growing *growing, uint64_t bytes) {
    uint64_t chunk = growing->pool == NULL ? CHUNK_LEAST : memory()->chunk ? memory()->chunk : CHUNK_MOST;
    uint64_t least = memory_rounded(bytes, CHUNK_LEAST), grown = memory_rounded(bytes, chunk);
    uint64_t left = growing->most > growing->counted ? growing->most - growing->counted : 0;
    if (growing->most > 0 && grown > left) /* not beyond its own maximum */
        return least > left ? least : memory_rounded(left, CHUNK_LEAST);
    return grown;
}

/* Whether the step in which the driver grows pools can be no smaller than `chunk`. With the lock. */
static bool step_known(void) {
    return memory()->chunk > 0 && memory()->surplus >= memory()->chunk / 2;
}

/* As the driver grows; or, as long as that may be less than expected, as little as there has to be. */
static bool reserve_new(struct growth *growth, bool exact) {
    uint64_t least = memory_rounded(growth->bytes, CHUNK_LEAST);
    if (exact || growth->reserved == least)
        return credits_reserve(growth->growing->place, growth->reserved);
    if (credits_reserve_ahead(growth->growing->place, growth->reserved))
        return true;
    growth->reserved = least;
    return credits_reserve(growth->growing->place, least);
}

static bool reserve(struct growth *growth, enum growing_reuse may_reuse) {
    struct growing *growing = growth->growing;
    begin();
    bool exact = growing->pool == NULL || step_known();
    uint64_t until = growing->refused_until, wanted = step(growing, growth->bytes);
    end();
    growth->learns = !exact;
    growth->reserved = wanted;
    if (credits_take(growing->place, growth->reserved))
        return true;
    bool reuse = may_reuse == REUSE_SURE || could_reuse(growing, growth->bytes);
    if (reuse && (!atomic_load(&the_process->session.ready) || sys_now() < until)) {
        growth->reserved = 0;
        return true;
    }
    if (reserve_new(growth, exact))
        return true;
    growth->reserved = wanted;
    if (!reuse && trim(growing) && reserve_new(growth, exact))
        return true;
    uint64_t there;
    growth->reserved = 0;
    begin();
    growing->refused_until = sys_now() + REFUSED_TIME;
    end();
    return reuse || (may_reuse == REUSE_LIKELY && figure(growing->pool, growing->device, false, &there) &&
                     there >= growth->bytes);
}

/* What a pool grew by for one call says in what steps the driver grows pools: they divide it, and are larger than what
 * it has beyond what the call needed. With the lock. */
static void learn(const struct growth *growth, uint64_t now) {
    struct memory *all = memory();
    if (!growth->learns || growth->growing->most > 0 || now <= growth->before)
        return;
    uint64_t grown = now - growth->before, chunk = grown & (~grown + 1); /* the largest power of two in it */
    uint64_t needed = memory_rounded(growth->bytes, CHUNK_LEAST), surplus = grown > needed ? grown - needed : 0;
    chunk = chunk > CHUNK_MOST ? CHUNK_MOST : chunk < CHUNK_LEAST ? CHUNK_LEAST : chunk;
    if (all->chunk == 0 || chunk < all->chunk || surplus >= all->chunk)
        all->chunk = chunk;
    if (surplus > all->surplus)
        all->surplus = surplus;
}

/* The driver's figure and the calls that were begun and ended before it was read; false: the pool is gone. */
static bool read(struct growing *growing, uint32_t *calls, uint64_t *now) {
    begin();
    CUmemoryPool pool = growing->pool;
    bool there = growing->state == GROWING_LIVE || growing->state == GROWING_LEFT;
    if (there) /* it is not destroyed meanwhile */
        atomic_fetch_add(&growing->readers, 1);
    *calls = growing->calls;
    end();
    if (!there)
        return false;
    if (!figure(pool, growing->device, false, now))
        *now = 0;
    if (atomic_fetch_sub(&growing->readers, 1) == 1)
        sys_wake_all(&growing->readers);
    return true;
}

bool growing_begin(struct growth *growth, struct growing *growing, uint64_t bytes, enum growing_reuse may_reuse) {
    *growth = (struct growth){.growing = growing, .bytes = bytes};
    if (growing->place < 0) {
        growth->growing = NULL; /* of a GPU that is none of the tenant's */
        return gpus_ungated(&the_process->gpus);
    }
    if (!reserve(growth, may_reuse))
        return false;
    uint32_t calls = 0;
    bool learns = growth->learns && read(growing, &calls, &growth->before);
    begin();
    growing->busy++;
    growing->calls++;
    growth->calls = growing->calls;
    growth->learns = learns && growth->calls == calls + 1; /* no other call was under way */
    growing->counted += growth->reserved;
    growing->pending += growth->reserved;
    bool watched = memory()->growing_watched;
    memory()->growing_watched = true;
    end();
    if (!watched)
        session_wake(&the_process->session);
    return true;
}

/* Counts no more than the driver's figure and what calls under way may yet take; nothing if calls began or ended since
 * that was read: they look themselves. Returns what is no longer counted. With the lock. */
static uint64_t lower(struct growing *growing, uint32_t calls, uint64_t now) {
    if (growing->calls != calls)
        return 0;
    uint64_t most = now + growing->pending, less = growing->counted > most ? growing->counted - most : 0;
    growing->counted -= less;
    return less;
}

/* The call is over; `more`: credits that are in use for it now. With the lock. */
static void finish_call(struct growth *growth, uint64_t more) {
    struct growing *growing = growth->growing;
    growing->busy--;
    growing->calls++;
    growing->pending -= growth->reserved;
    growing->counted += more;
}

bool growing_end(struct growth *growth) {
    struct growing *growing = growth->growing;
    uint64_t now = 0, less = 0;
    uint32_t calls;
    if (growing == NULL)
        return true;
    bool there = read(growing, &calls, &now);
    begin();
    if (there && growing->calls == calls && growing->busy == 1 && calls == growth->calls)
        learn(growth, now);
    uint64_t more = there && now > growing->counted ? now - growing->counted : 0;
    end();
    if (more > 0 && !credits_reserve(growing->place, more))
        return false;
    begin();
    bool alone = growing->calls == calls;
    finish_call(growth, more);
    if (there && alone)
        less = lower(growing, growing->calls, now);
    end();
    credits_return(growing->place, less);
    return true;
}

void growing_close(struct growth *growth) {
    begin();
    finish_call(growth, 0);
    end();
    growing_settle(growth->growing);
}

void growing_settle(struct growing *growing) {
    uint32_t calls;
    uint64_t now, more = 0;
    if (!read(growing, &calls, &now))
        return;
    begin();
    int place = growing->place;
    uint64_t less = lower(growing, calls, now);
    if (growing->calls == calls && growing->busy == 0 && now > growing->counted) {
        more = now - growing->counted;
        growing->counted = now;
    }
    end();
    credits_return(place, less);
    credits_grow(place, more);
}

/* From one state to ENDING, once nobody reads its figures any more; false if another was faster. */
static bool claim(struct growing *growing, enum growing_state from) {
    begin();
    bool claimed = growing->state == from;
    if (claimed)
        growing->state = GROWING_ENDING;
    end();
    for (uint32_t readers; claimed && (readers = atomic_load(&growing->readers)) > 0;)
        sys_wait(&growing->readers, readers, SYS_MS);
    return claimed;
}

static void go_on_as(struct growing *growing, enum growing_state state) {
    begin();
    growing->state = state;
    end();
}

/* What is claimed: whether nothing is left in it, after a trim. */
static bool empty(const struct growing *growing) {
    uint64_t reserved = 0;
    if (HAS(cuMemPoolTrimTo))
        DRIVER(cuMemPoolTrimTo)(growing->pool, 0);
    return !figure(growing->pool, growing->device, false, &reserved) || reserved == 0;
}

/* What is claimed ends; if the driver will not have it, it is as before. */
static CUresult destroy(struct growing *growing, enum growing_state before) {
    uint64_t counted = 0;
    CUresult result = DRIVER(cuMemPoolDestroy)(growing->pool);
    begin();
    growing->state = before;
    if (result == CUDA_SUCCESS) {
        counted = growing->counted;
        growing->counted = 0;
        growing->pool = NULL;
        growing->calls++;
        growing->state = GROWING_VACANT;
    }
    end();
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
    CUstreamCaptureMode mode = streams_hide();
    if (growing->place < 0 || empty(growing)) {
        result = destroy(growing, GROWING_LIVE);
    } else {
        put_away(growing);
        go_on_as(growing, GROWING_LEFT);
    }
    streams_unhide(mode);
    return result;
}

/* Of a pool that the program has destroyed: if it is empty by now it goes. */
static void finish(struct growing *growing) {
    if (!claim(growing, GROWING_LEFT))
        return;
    CUstreamCaptureMode mode = streams_hide();
    if (!empty(growing) || destroy(growing, GROWING_LEFT) != CUDA_SUCCESS)
        go_on_as(growing, GROWING_LEFT);
    streams_unhide(mode);
}

/* The next of a GPU (-1: of any), and what is counted for it; NULL after the last. */
static struct growing *next_of(const struct growing *after, int place, uint64_t *counted) {
    begin();
    struct growing *growing = after != NULL ? after->next : memory()->growing;
    while (growing != NULL && (growing->place < 0 || (place >= 0 && growing->place != place)))
        growing = growing->next;
    *counted = growing != NULL ? growing->counted : 0;
    end();
    return growing;
}

bool growing_refresh(int place) {
    bool less = false;
    uint64_t before;
    for (struct growing *at = next_of(NULL, place, &before); at != NULL; at = next_of(at, place, &before)) {
        finish(at);
        growing_settle(at);
        begin();
        less |= at->counted < before;
        end();
    }
    return less;
}

uint64_t growing_step(uint64_t now) {
    struct memory *all = memory();
    begin();
    bool watched = all->growing_watched;
    end();
    if (!watched || now < all->next_look)
        return watched ? all->next_look : SYS_NEVER;
    growing_refresh(-1);
    begin();
    watched = false;
    for (const struct growing *growing = all->growing; growing != NULL; growing = growing->next)
        watched |= growing->counted > 0 || growing->busy > 0 || growing->state == GROWING_LEFT;
    all->growing_watched = watched;
    end();
    all->next_look = now + GROWING_LOOK;
    return watched ? all->next_look : SYS_NEVER;
}
