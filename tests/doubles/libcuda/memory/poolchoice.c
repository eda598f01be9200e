/* A device's default pool and current pool. */
#include "memory/pool.h"

static struct pool *defaults[FAKE_DEVICES], *currents[FAKE_DEVICES];

static struct pool *default_of(int device) {
    if (defaults[device] == NULL)
        defaults[device] = fake_pool_new(device, 0, false);
    return defaults[device];
}

struct pool *fake_pool_current(int device) {
    return currents[device] != NULL ? currents[device] : default_of(device);
}

void fake_pool_not_current(const struct pool *pool) {
    for (int device = 0; device < FAKE_DEVICES; device++)
        if (currents[device] == pool)
            currents[device] = NULL;
}

static CUresult get(CUmemoryPool *out, CUdevice ordinal, struct pool *(*of)(int)) {
    int device;
    pthread_mutex_lock(&fake_lock);
    CUresult result = out == NULL ? CUDA_ERROR_INVALID_VALUE : fake_find_device(ordinal, &device);
    if (result == CUDA_SUCCESS)
        *out = (CUmemoryPool)of(device);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice ordinal) {
    return get(out, ordinal, default_of);
}

EXPORT CUresult cuDeviceGetMemPool(CUmemoryPool *out, CUdevice ordinal) {
    return get(out, ordinal, fake_pool_current);
}

EXPORT CUresult cuDeviceSetMemPool(CUdevice ordinal, CUmemoryPool handle) {
    int device;
    pthread_mutex_lock(&fake_lock);
    CUresult result = fake_find_device(ordinal, &device);
    struct pool *pool = fake_pool_of(handle);
    if (result == CUDA_SUCCESS && (pool == NULL || pool->device != device || pool->imported))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        currents[device] = pool;
    pthread_mutex_unlock(&fake_lock);
    return result;
}

/* The calls of CUDA 13, which select a pool by location and type. The double supports pools of a device's pinned
 * memory. */
static bool ordinary(const CUmemLocation *location, CUmemAllocationType type) {
    return location != NULL && location->type == CU_MEM_LOCATION_TYPE_DEVICE && type == CU_MEM_ALLOCATION_TYPE_PINNED;
}

EXPORT CUresult cuMemGetDefaultMemPool(CUmemoryPool *out, CUmemLocation *location, CUmemAllocationType type) {
    return ordinary(location, type) ? get(out, location->id, default_of) : CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuMemGetMemPool(CUmemoryPool *out, CUmemLocation *location, CUmemAllocationType type) {
    return ordinary(location, type) ? get(out, location->id, fake_pool_current) : CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool) {
    return ordinary(location, type) ? cuDeviceSetMemPool(location->id, pool) : CUDA_ERROR_NOT_SUPPORTED;
}
