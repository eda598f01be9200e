/* Registry of pools: a list of all pools and graph pools that the process has used.
 *
 * Entries stay in the list. The entry of a destroyed pool is reused for the next pool. Its counter `calls` then
 * continues from its old value, so that a reader recognizes a byte count of the old pool as out of date.
 */
#include "memory/pools/pool_memory.h"

#include "driver/entries.h"
#include "memory/state.h"
#include "base/slab.h"

/* Return the entry of a registered pool; `pool` NULL: of the device's graph pool. NULL: it is not registered. The
 * caller holds the lock. */
static struct pool_memory *known(CUmemoryPool pool, CUdevice device) {
    for (struct pool_memory *memory = memory_state()->pools; memory != NULL; memory = memory->next)
        if (memory->pool == pool && memory->state == POOL_LIVE && (pool != NULL || memory->device == device))
            return memory;
    return NULL;
}

/* Return an entry for a new pool; NULL: host memory is exhausted. The caller holds the lock. */
static struct pool_memory *fresh(void) {
    for (struct pool_memory *memory = memory_state()->pools; memory != NULL; memory = memory->next)
        if (memory->state == POOL_VACANT && memory->busy == 0)
            return memory;
    struct pool_memory *memory = slab_take(&memory_state()->pool_slab, sizeof *memory);
    if (memory != NULL) {
        memory->next = memory_state()->pools;
        memory_state()->pools = memory;
    }
    return memory;
}

/* Return the entry of a pool, registered if necessary; NULL: host memory is exhausted. */
static struct pool_memory *know(CUmemoryPool pool, CUdevice device, enum pool_origin origin, uint64_t most) {
    int place = origin == POOL_ELSEWHERE ? -1 : gpus_place(memory_state()->gpus, device);
    memory_lock();
    struct pool_memory *memory = known(pool, device);
    if (memory == NULL && (memory = fresh()) != NULL) {
        *memory = (struct pool_memory){.next = memory->next,
                                       .pool = pool,
                                       .device = device,
                                       .place = place,
                                       .origin = origin,
                                       .most = most,
                                       .calls = memory->calls + 1};
        if (pool == NULL)
            atomic_store(&memory_state()->graph_pools, true);
    }
    memory_unlock();
    return memory;
}

struct pool_memory *pool_register(CUmemoryPool pool, CUdevice device, enum pool_origin origin, uint64_t most) {
    return know(pool, device, origin, most);
}

struct pool_memory *graph_pool_register(CUdevice device) {
    return know(NULL, device, POOL_FOUND, 0);
}

/* Find the device of a pool whose creation the hook did not see. `*device` is unchanged if the driver does not report
 * it. Return false for a pool of host memory. */
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

struct pool_memory *pool_find(CUmemoryPool pool, CUdevice device) {
    memory_lock();
    struct pool_memory *memory = known(pool, 0);
    memory_unlock();
    if (memory != NULL || !HAS(cuMemPoolGetAttribute))
        return memory;
    return locate(pool, &device) ? know(pool, device, POOL_FOUND, 0) : NULL;
}

CUmemoryPool pool_current(CUdevice device) {
    struct memory *all = memory_state();
    bool kept = device >= 0 && device < MEMORY_CURRENT_POOLS;
    CUmemoryPool pool = NULL;
    memory_lock();
    uint32_t chosen = all->pools_chosen;
    if (kept)
        pool = all->current_pools[device];
    memory_unlock();
    if (pool != NULL || !HAS(cuDeviceGetMemPool) || DRIVER(cuDeviceGetMemPool)(&pool, device) != CUDA_SUCCESS)
        return pool;
    memory_lock();
    if (kept && all->pools_chosen == chosen)
        all->current_pools[device] = pool;
    memory_unlock();
    return pool;
}

void pool_current_changed(void) {
    struct memory *all = memory_state();
    memory_lock();
    all->pools_chosen++;
    for (int i = 0; i < MEMORY_CURRENT_POOLS; i++)
        all->current_pools[i] = NULL;
    memory_unlock();
}

struct pool_memory *pool_find_made(CUmemoryPool pool) {
    memory_lock();
    struct pool_memory *memory = pool != NULL ? known(pool, 0) : NULL;
    memory_unlock();
    return memory != NULL && memory->origin != POOL_FOUND ? memory : NULL;
}

struct pool_memory *graph_pool_next(const struct pool_memory *after) {
    memory_lock();
    struct pool_memory *memory = after != NULL ? after->next : memory_state()->pools;
    while (memory != NULL && (memory->pool != NULL || memory->state != POOL_LIVE))
        memory = memory->next;
    memory_unlock();
    return memory;
}

bool graph_pool_any(void) {
    const struct memory *memory = memory_state();
    return memory != NULL && atomic_load_explicit(&memory->graph_pools, memory_order_relaxed);
}
