/* See growing.h. */
#include "growing.h"

#include "credits.h"
#include "process.h"
#include "slab.h"

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

static uint64_t rounded(uint64_t bytes, uint64_t step) {
    return bytes > UINT64_MAX - step ? UINT64_MAX / step * step : (bytes + step - 1) / step * step;
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

/* With the lock. */
static struct growing *known(CUmemoryPool pool, CUdevice device) {
    for (struct growing *growing = memory()->growing; growing != NULL; growing = growing->next)
        if (growing->pool == pool && growing->state == GROWING_LIVE && (pool != NULL || growing->device == device))
            return growing;
    return NULL;
}

/* With the lock. */
static struct growing *fresh(void) {
    for (struct growing *growing = memory()->growing; growing != NULL; growing = growing->next)
        if (growing->state == GROWING_VACANT && growing->busy == 0)
            return growing;
    struct growing *growing = slab_take(&memory()->growing_slab, sizeof *growing);
    if (growing != NULL) {
        growing->next = memory()->growing;
        memory()->growing = growing;
    }
    return growing;
}

static struct growing *know(CUmemoryPool pool, CUdevice device, enum pool_origin origin) {
    int place = origin == POOL_IMPORTED ? -1 : gpus_place(&the_process->gpus, device);
    begin();
    struct growing *growing = known(pool, device);
    if (growing == NULL && (growing = fresh()) != NULL) {
        *growing = (struct growing){.next = growing->next,
                                    .pool = pool,
                                    .device = device,
                                    .place = place,
                                    .origin = origin,
                                    .calls = growing->calls + 1};
        if (pool == NULL)
            atomic_store(&memory()->graphs, true);
    }
    end();
    return growing;
}

struct growing *growing_pool(CUmemoryPool pool, CUdevice device, enum pool_origin origin) {
    return know(pool, device, origin);
}

struct growing *growing_graphs(CUdevice device) {
    return know(NULL, device, POOL_FOUND);
}

/* Where a pool is that was not seen made; false: in the host's memory. */
static bool locate(CUmemoryPool pool, CUdevice *device) {
    CUmemoryPool other;
    int type = 0, id = 0, count = 0;
    if (DRIVER(cuMemPoolGetAttribute)(pool, CU_MEMPOOL_ATTR_LOCATION_TYPE, &type) == CUDA_SUCCESS) {
        if (type == CU_MEM_LOCATION_TYPE_DEVICE &&
            DRIVER(cuMemPoolGetAttribute)(pool, CU_MEMPOOL_ATTR_LOCATION_ID, &id) == CUDA_SUCCESS)
            *device = id;
        return type != CU_MEM_LOCATION_TYPE_HOST && type != CU_MEM_LOCATION_TYPE_HOST_NUMA &&
               type != CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
    }
    if (!HAS(cuDeviceGetCount) || DRIVER(cuDeviceGetCount)(&count) != CUDA_SUCCESS || !HAS(cuDeviceGetDefaultMemPool))
        return true;
    for (CUdevice at = 0; at < count; at++)
        if (DRIVER(cuDeviceGetDefaultMemPool)(&other, at) == CUDA_SUCCESS && other == pool)
            *device = at;
    return true;
}

struct growing *growing_find(CUmemoryPool pool, CUdevice device) {
    begin();
    struct growing *growing = known(pool, 0);
    end();
    if (growing != NULL || !HAS(cuMemPoolGetAttribute))
        return growing;
    return locate(pool, &device) ? know(pool, device, POOL_FOUND) : NULL;
}

struct growing *growing_made(CUmemoryPool pool) {
    begin();
    struct growing *growing = pool != NULL ? known(pool, 0) : NULL;
    end();
    return growing != NULL && growing->origin != POOL_FOUND ? growing : NULL;
}

struct growing *growing_next_graphs(const struct growing *after) {
    begin();
    struct growing *growing = after != NULL ? after->next : memory()->growing;
    while (growing != NULL && (growing->pool != NULL || growing->state != GROWING_LIVE))
        growing = growing->next;
    end();
    return growing;
}

bool growing_any_graphs(void) {
    return atomic_load_explicit(&memory()->graphs, memory_order_relaxed);
}

/* Whether unused memory of it could serve the call. */
static bool could_reuse(const struct growing *growing, uint64_t bytes) {
    uint64_t reserved, used;
    return figure(growing->pool, growing->device, false, &reserved) &&
           figure(growing->pool, growing->device, true, &used) && reserved >= used && reserved - used >= bytes;
}

static bool reserve(struct growth *growth, bool reuse) {
    struct growing *growing = growth->growing;
    begin();
    uint64_t chunk = growing->chunk, until = growing->refused_until;
    end();
    growth->reserved = rounded(growth->bytes, chunk ? chunk : CHUNK_MOST);
    if (credits_take(growing->place, growth->reserved))
        return true;
    bool asking = !reuse || (atomic_load(&the_process->session.ready) && sys_now() >= until);
    if (asking && credits_reserve(growing->place, growth->reserved))
        return true;
    if (asking && chunk == 0) { /* it may be content with less */
        growth->reserved = rounded(growth->bytes, CHUNK_LEAST);
        if (credits_reserve(growing->place, growth->reserved))
            return true;
    }
    growth->reserved = 0;
    if (asking && reuse) {
        begin();
        growing->refused_until = sys_now() + REFUSED_TIME;
        end();
    }
    return reuse;
}

bool growing_begin(struct growth *growth, struct growing *growing, uint64_t bytes, bool may_reuse) {
    *growth = (struct growth){.growing = growing, .bytes = bytes};
    if (growing->place < 0) {
        growth->growing = NULL; /* of a GPU that is none of the tenant's */
        return gpus_ungated(&the_process->gpus);
    }
    if (!reserve(growth, may_reuse || could_reuse(growing, bytes)))
        return false;
    begin();
    growing->busy++;
    growing->calls++;
    growing->counted += growth->reserved;
    growing->pending += growth->reserved;
    bool watched = memory()->growing_watched;
    memory()->growing_watched = true;
    end();
    if (!watched)
        session_wake(&the_process->session);
    return true;
}

/* What the driver was seen to grow by says in what steps it does. */
static void learn(struct growing *growing, uint64_t now) {
    if (now > growing->last) {
        uint64_t chunk = (now - growing->last) & (~(now - growing->last) + 1); /* the largest power of two in it */
        growing->chunk = chunk > CHUNK_MOST ? CHUNK_MOST : chunk < CHUNK_LEAST ? CHUNK_LEAST : chunk;
    }
    growing->last = now;
}

/* What a look found: how much went back, and how much more there is than is counted. */
struct found {
    uint64_t less, more;
};

/* The driver may be asked about it until leave(). */
static bool enter(struct growing *growing, uint32_t *calls, CUmemoryPool *pool) {
    begin();
    bool there = growing->state == GROWING_LIVE || growing->state == GROWING_LEFT;
    if (there)
        atomic_fetch_add(&growing->readers, 1);
    *calls = growing->calls;
    *pool = growing->pool;
    end();
    return there;
}

static void leave(struct growing *growing) {
    if (atomic_fetch_sub(&growing->readers, 1) == 1)
        sys_wake_all(&growing->readers);
}

/* Counts the driver's figure, and beside it what calls under way may yet take. Nothing if calls began or ended while it
 * was read: they look themselves. */
static struct found look(struct growing *growing) {
    struct found found = {0, 0};
    uint32_t calls;
    uint64_t now;
    CUmemoryPool pool;
    if (!enter(growing, &calls, &pool))
        return found;
    if (!figure(pool, growing->device, false, &now))
        now = 0;
    begin();
    if (growing->calls == calls) {
        if (growing->busy == 0)
            learn(growing, now);
        if (now > growing->counted) {
            found.more = now - growing->counted;
        } else if (now + growing->pending < growing->counted) {
            found.less = growing->counted - now - growing->pending;
            growing->counted -= found.less;
        }
    }
    end();
    leave(growing);
    credits_return(growing->place, found.less);
    return found;
}

static void count_more(struct growing *growing, uint64_t more) {
    begin();
    growing->counted += more;
    end();
}

bool growing_end(struct growth *growth) {
    struct growing *growing = growth->growing;
    if (growing == NULL)
        return true;
    begin();
    growing->busy--;
    growing->calls++;
    growing->pending -= growth->reserved;
    end();
    struct found found = look(growing);
    if (found.more > 0 && !credits_reserve(growing->place, found.more))
        return false;
    count_more(growing, found.more);
    return true;
}

void growing_settle(struct growing *growing) {
    struct found found = look(growing);
    credits_grow(growing->place, found.more);
    count_more(growing, found.more);
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

bool growing_refresh(int place) {
    bool less = false;
    begin();
    struct growing *first = memory()->growing;
    end();
    for (struct growing *growing = first; growing != NULL; growing = growing->next) {
        if (growing->place < 0 || (place >= 0 && growing->place != place))
            continue;
        begin();
        uint64_t before = growing->counted;
        bool left = growing->state == GROWING_LEFT;
        end();
        if (left)
            finish(growing);
        growing_settle(growing);
        begin();
        less |= growing->counted < before;
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
