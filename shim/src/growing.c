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

/* Nothing any more: its place in the list stays, for the next. With the lock. */
static bool vacant(const struct growing *growing) {
    return growing->ending && growing->pool == NULL;
}

/* With the lock. */
static struct growing *known(CUmemoryPool pool, CUdevice device) {
    for (struct growing *growing = memory()->growing; growing != NULL; growing = growing->next)
        if (growing->pool == pool && !growing->ending && (pool != NULL || growing->device == device))
            return growing;
    return NULL;
}

/* With the lock. */
static struct growing *fresh(void) {
    for (struct growing *growing = memory()->growing; growing != NULL; growing = growing->next)
        if (vacant(growing) && growing->busy == 0)
            return growing;
    struct growing *growing = slab_take(&memory()->growing_slab, sizeof *growing);
    if (growing != NULL) {
        growing->next = memory()->growing;
        memory()->growing = growing;
    }
    return growing;
}

static struct growing *know(CUmemoryPool pool, CUdevice device, bool made) {
    int place = gpus_place(&the_process->gpus, device);
    begin();
    struct growing *growing = known(pool, device);
    if (growing == NULL && (growing = fresh()) != NULL) {
        *growing = (struct growing){.next = growing->next,
                                    .pool = pool,
                                    .device = device,
                                    .place = place,
                                    .made = made,
                                    .calls = growing->calls + 1};
        if (pool == NULL)
            atomic_store(&memory()->graphs, true);
    }
    end();
    return growing;
}

struct growing *growing_pool(CUmemoryPool pool, CUdevice device, bool made) {
    return know(pool, device, made);
}

struct growing *growing_graphs(CUdevice device) {
    return know(NULL, device, false);
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
    return locate(pool, &device) ? know(pool, device, false) : NULL;
}

struct growing *growing_made(CUmemoryPool pool) {
    begin();
    struct growing *growing = pool != NULL ? known(pool, 0) : NULL;
    end();
    return growing != NULL && growing->made ? growing : NULL;
}

struct growing *growing_next_graphs(const struct growing *after) {
    begin();
    struct growing *growing = after != NULL ? after->next : memory()->growing;
    while (growing != NULL && (growing->pool != NULL || growing->ending))
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

/* Counts the driver's figure if no call is under way, nor was while it was read. */
static struct found look(struct growing *growing) {
    struct found found = {0, 0};
    uint64_t now;
    begin();
    uint32_t calls = growing->calls;
    CUmemoryPool pool = growing->pool;
    bool still = growing->busy == 0 && !vacant(growing);
    end();
    if (!still)
        return found;
    if (!figure(pool, growing->device, false, &now))
        now = 0;
    begin();
    if (growing->busy == 0 && growing->calls == calls) {
        learn(growing, now);
        if (now > growing->counted) {
            found.more = now - growing->counted;
        } else {
            found.less = growing->counted - now;
            growing->counted = now;
        }
    }
    end();
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
    end();
    struct found found = look(growing);
    if (found.more > 0 && !credits_reserve(growing->place, found.more))
        return false;
    count_more(growing, found.more);
    return true;
}

bool growing_settle(struct growing *growing) {
    struct found found = look(growing);
    credits_grow(growing->place, found.more);
    count_more(growing, found.more);
    return found.less > 0;
}

bool growing_destroy(struct growing *growing) {
    uint64_t reserved = 0, none = 0;
    CUmemoryPool pool = growing->pool, present;
    begin();
    growing->ending = true;
    end();
    if (HAS(cuMemPoolTrimTo))
        DRIVER(cuMemPoolTrimTo)(pool, 0);
    if (!figure(pool, growing->device, false, &reserved) || reserved == 0)
        return true;
    DRIVER(cuMemPoolSetAttribute)(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &none);
    if (DRIVER(cuDeviceGetMemPool)(&present, growing->device) == CUDA_SUCCESS && present == pool &&
        DRIVER(cuDeviceGetDefaultMemPool)(&present, growing->device) == CUDA_SUCCESS)
        DRIVER(cuDeviceSetMemPool)(growing->device, present);
    return false;
}

void growing_destroyed(struct growing *growing, bool done) {
    uint64_t counted = 0;
    begin();
    growing->ending = done;
    if (done) {
        counted = growing->counted;
        growing->counted = 0;
        growing->pool = NULL;
        growing->calls++;
    }
    end();
    credits_return(growing->place, counted);
}

/* Of a pool that the program has destroyed: whether it is empty by now, and gone. */
static void finish(struct growing *growing) {
    uint64_t reserved = 0;
    CUmemoryPool pool = growing->pool;
    if (pool == NULL)
        return;
    if (HAS(cuMemPoolTrimTo))
        DRIVER(cuMemPoolTrimTo)(pool, 0);
    if (figure(pool, growing->device, false, &reserved) && reserved > 0)
        return;
    growing_destroyed(growing, true);
    DRIVER(cuMemPoolDestroy)(pool);
}

bool growing_refresh(int place) {
    bool less = false;
    begin();
    struct growing *first = memory()->growing;
    end();
    for (struct growing *growing = first; growing != NULL; growing = growing->next) {
        if (growing->place < 0 || (place >= 0 && growing->place != place))
            continue;
        uint64_t before = growing->counted;
        if (growing->ending)
            finish(growing);
        less |= growing_settle(growing) || growing->counted < before;
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
        watched |= growing->counted > 0 || growing->busy > 0;
    all->growing_watched = watched;
    end();
    all->next_look = now + GROWING_LOOK;
    return watched ? all->next_look : SYS_NEVER;
}
