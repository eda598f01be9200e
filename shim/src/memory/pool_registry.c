/* Which pools of memory there are, and which devices keep memory for graphs. See growing.h. */
#include "memory/pool_memory.h"

#include "driver/entries.h"
#include "memory/lock.h"
#include "base/slab.h"

/* With the lock. */
static struct growing *known(CUmemoryPool pool, CUdevice device) {
    for (struct growing *growing = books()->growing; growing != NULL; growing = growing->next)
        if (growing->pool == pool && growing->state == GROWING_LIVE && (pool != NULL || growing->device == device))
            return growing;
    return NULL;
}

/* With the lock. */
static struct growing *fresh(void) {
    for (struct growing *growing = books()->growing; growing != NULL; growing = growing->next)
        if (growing->state == GROWING_VACANT && growing->busy == 0)
            return growing;
    struct growing *growing = slab_take(&books()->growing_slab, sizeof *growing);
    if (growing != NULL) {
        growing->next = books()->growing;
        books()->growing = growing;
    }
    return growing;
}

static struct growing *know(CUmemoryPool pool, CUdevice device, enum pool_origin origin, uint64_t most) {
    int place = origin == POOL_ELSEWHERE ? -1 : gpus_place(books()->gpus, device);
    books_lock();
    struct growing *growing = known(pool, device);
    if (growing == NULL && (growing = fresh()) != NULL) {
        *growing = (struct growing){.next = growing->next,
                                    .pool = pool,
                                    .device = device,
                                    .place = place,
                                    .origin = origin,
                                    .most = most,
                                    .calls = growing->calls + 1};
        if (pool == NULL)
            atomic_store(&books()->graphs, true);
    }
    books_unlock();
    return growing;
}

struct growing *growing_pool(CUmemoryPool pool, CUdevice device, enum pool_origin origin, uint64_t most) {
    return know(pool, device, origin, most);
}

struct growing *growing_graphs(CUdevice device) {
    return know(NULL, device, POOL_FOUND, 0);
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
    books_lock();
    struct growing *growing = known(pool, 0);
    books_unlock();
    if (growing != NULL || !HAS(cuMemPoolGetAttribute))
        return growing;
    return locate(pool, &device) ? know(pool, device, POOL_FOUND, 0) : NULL;
}

struct growing *growing_made(CUmemoryPool pool) {
    books_lock();
    struct growing *growing = pool != NULL ? known(pool, 0) : NULL;
    books_unlock();
    return growing != NULL && growing->origin != POOL_FOUND ? growing : NULL;
}

struct growing *growing_next_graphs(const struct growing *after) {
    books_lock();
    struct growing *growing = after != NULL ? after->next : books()->growing;
    while (growing != NULL && (growing->pool != NULL || growing->state != GROWING_LIVE))
        growing = growing->next;
    books_unlock();
    return growing;
}

bool growing_any_graphs(void) {
    const struct memory *memory = books();
    return memory != NULL && atomic_load_explicit(&memory->graphs, memory_order_relaxed);
}
