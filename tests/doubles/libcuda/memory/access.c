/* Access rights: of contexts to the memory of other devices' contexts (peer access), and of devices to pools. */
#include "memory/pool.h"

#include <stdlib.h>

/* Context whose memory another context may use. */
struct peer {
    const struct context *of, *by;
    struct peer *next;
};

static struct peer *peers;

static struct peer **find(const struct context *of, const struct context *by) {
    struct peer **at = &peers;
    while (*at != NULL && ((*at)->of != of || (*at)->by != by))
        at = &(*at)->next;
    return at;
}

/* Get the current context and the context of a handle, which must be of another device. */
static CUresult both(CUcontext handle, struct context **own, struct context **other) {
    CUresult result = fake_enter(own);
    *other = (struct context *)handle;
    if (result != CUDA_SUCCESS)
        return result;
    if (!fake_is(*other, MAGIC_CONTEXT) || !(*other)->alive)
        return CUDA_ERROR_INVALID_CONTEXT;
    return (*own)->device == (*other)->device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

EXPORT CUresult cuCtxEnablePeerAccess(CUcontext handle, unsigned int flags) {
    struct context *own, *other;
    CUresult result = both(handle, &own, &other);
    if (result == CUDA_SUCCESS && flags != 0)
        result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    if (result == CUDA_SUCCESS && *find(other, own) != NULL) {
        result = CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    } else if (result == CUDA_SUCCESS) {
        struct peer *peer = malloc(sizeof *peer);
        *peer = (struct peer){other, own, peers};
        peers = peer;
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuCtxDisablePeerAccess(CUcontext handle) {
    struct context *own, *other;
    CUresult result = both(handle, &own, &other);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    struct peer **at = find(other, own), *peer = *at;
    if (peer != NULL)
        *at = peer->next;
    pthread_mutex_unlock(&fake_lock);
    free(peer);
    return peer != NULL ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
}

/* Return the access flags of a device for a pool. The pool's own device may always read and write. */
static CUmemAccess_flags *access_of(struct pool *pool, const CUmemLocation *location) {
    int device;
    if (location->type != CU_MEM_LOCATION_TYPE_DEVICE || fake_find_device(location->id, &device) != CUDA_SUCCESS)
        return NULL;
    if (device == pool->device)
        pool->access[device] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return &pool->access[device];
}

EXPORT CUresult cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc *list, size_t count) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    struct pool *pool = fake_pool_of(handle);
    if (pool == NULL || (list == NULL && count != 0))
        result = CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; result == CUDA_SUCCESS && i < count; i++) {
        CUmemAccess_flags *flags = access_of(pool, &list[i].location);
        bool own = flags != NULL && flags == &pool->access[pool->device < 0 ? 0 : pool->device] && pool->device >= 0;
        if (flags == NULL || (own && list[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE))
            result = CUDA_ERROR_INVALID_VALUE;
        else
            *flags = list[i].flags;
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuMemPoolGetAccess(CUmemAccess_flags *out, CUmemoryPool handle, CUmemLocation *location) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    struct pool *pool = fake_pool_of(handle);
    const CUmemAccess_flags *flags = pool != NULL && location != NULL ? access_of(pool, location) : NULL;
    if (out == NULL || flags == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    else
        *out = *flags;
    pthread_mutex_unlock(&fake_lock);
    return result;
}
