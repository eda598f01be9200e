/* Memory pools of the double (cuMemAllocAsync). A pool may have reserved more memory than its allocations use.
 *
 * A pool grows by the missing bytes, in chunks of 32 MiB (FAKE_CUDA_POOL_CHUNK changes that). If a chunk is too much
 * for the device or for the pool's own limit, it grows in steps of 2 MiB. Memory that was freed on a stream serves that
 * stream at once, and other streams after the work before the free has ended. Memory above the release threshold is
 * returned to the device when the host waits for a stream, an event or a context. As CUDA documents, a pool that can be
 * exported returns no memory before its end: a trim does nothing, and the threshold is ignored.
 */
#include "memory/pool.h"

#include <stdlib.h>

#include "work/graph.h"
#include "work/graphmemory.h"
#include "memory/memory.h"

enum { DEFAULT_CHUNK = 32 << 20 };

/* Memory that was freed on a stream which has not reached the free yet. */
struct freed {
    struct pool *pool;
    int opened; /* of an imported pool: place of the memory in the table of shared memory */
    struct stream *stream;
    uint64_t bytes;
    struct freed *next;
};

static struct pool *pools;

static uint64_t chunk(void) {
    const char *text = getenv("FAKE_CUDA_POOL_CHUNK");
    uint64_t bytes = text == NULL ? 0 : strtoull(text, NULL, 10);
    return bytes > 0 ? fake_round(bytes, PAGE_BYTES) : DEFAULT_CHUNK;
}

struct pool *fake_pool_new(int device, uint64_t most, bool own) {
    struct pool *pool = calloc(1, sizeof *pool);
    *pool = (struct pool){
        .magic = MAGIC_POOL, .device = device, .most = most, .own = own, .id = fake_new_id(), .next = pools};
    for (int i = 1; i <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES; i++)
        pool->settings[i] = 1;
    pools = pool;
    return pool;
}

struct pool *fake_pool_of(CUmemoryPool handle) {
    struct pool *pool = (struct pool *)handle;
    return fake_is(pool, MAGIC_POOL) && !pool->destroyed ? pool : NULL;
}

static void give(struct pool *pool, uint64_t bytes) {
    pool->reserved -= bytes;
    if (pool->device >= 0)
        fake_state_give(pool->device, FAKE_POOL, bytes);
}

/* Return unused memory above `keep` bytes to the device, in whole pages. */
static void trim(struct pool *pool, uint64_t keep) {
    bool ended = pool->destroyed && pool->used + pool->returning == 0;
    if (pool->handles != CU_MEM_HANDLE_TYPE_NONE && !ended)
        return;
    if (keep >= pool->reserved)
        return;
    uint64_t needed = fake_round(pool->used + pool->returning, PAGE_BYTES);
    uint64_t left = needed > keep ? needed : fake_round(keep, PAGE_BYTES);
    if (left < pool->reserved)
        give(pool, pool->reserved - left);
}

static void end_if_done(struct pool *pool) {
    if (!pool->destroyed || pool->used > 0 || pool->returning > 0)
        return;
    if (pool->shared)
        fake_state_leave(pool->id);
    trim(pool, 0);
    for (struct pool **at = &pools; *at != NULL; at = &(*at)->next)
        if (*at == pool) {
            *at = pool->next;
            break;
        }
    pool->magic = 0;
    free(pool);
}

void fake_pools_waited(int device) {
    fake_settle(device);
    for (struct pool *pool = pools; pool != NULL; pool = pool->next)
        if (pool->device == device)
            trim(pool, pool->threshold);
}

static bool grow(struct pool *pool, uint64_t missing) {
    const uint64_t steps[] = {chunk(), PAGE_BYTES};
    for (int i = 0; i < 2; i++) {
        uint64_t more = fake_round(missing, steps[i]);
        if (pool->most != 0 && pool->reserved + more > fake_round(pool->most, PAGE_BYTES))
            continue;
        if (pool->device >= 0 && !fake_state_take(pool->device, FAKE_POOL, more))
            continue;
        pool->reserved += more;
        if (pool->reserved > pool->reserved_high)
            pool->reserved_high = pool->reserved;
        return true;
    }
    return false;
}

/* Return the bytes that this stream cannot use yet, because another stream has freed them and not reached the free. */
static uint64_t out_of_reach(const struct pool *pool, const struct stream *stream) {
    uint64_t bytes = 0;
    for (const struct freed *freed = pool->freed; freed != NULL; freed = freed->next)
        if (freed->stream != stream)
            bytes += freed->bytes;
    return bytes;
}

static CUresult take(struct pool *pool, struct stream *stream, size_t bytes, CUdeviceptr *out) {
    uint64_t rounded = fake_round(bytes, GRANULARITY);
    if (rounded < bytes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t needed = pool->used + out_of_reach(pool, stream) + rounded;
    if (needed > pool->reserved && !grow(pool, needed - pool->reserved))
        return CUDA_ERROR_OUT_OF_MEMORY;
    pool->used += rounded;
    if (pool->used > pool->used_high)
        pool->used_high = pool->used;
    *out = fake_range_add((struct range){.bytes = rounded,
                                         .asked = bytes,
                                         .kind = RANGE_POOL,
                                         .device = pool->device < 0 ? 0 : pool->device,
                                         .context = stream->context,
                                         .object = pool},
                          GRANULARITY, 0)
               ->address;
    return CUDA_SUCCESS;
}

void fake_pool_return(struct range *range) {
    struct pool *pool = range->object;
    pool->used -= range->bytes;
    if (pool->imported)
        fake_state_close(range->opened);
    end_if_done(pool);
}

static void over(void *of) {
    struct freed *entry = of;
    for (struct freed **at = &entry->pool->freed; *at != NULL; at = &(*at)->next)
        if (*at == entry) {
            *at = entry->next;
            break;
        }
    entry->pool->returning -= entry->bytes;
    if (entry->pool->imported)
        fake_state_close(entry->opened);
    end_if_done(entry->pool);
    free(entry);
}

static CUresult allocate(CUdeviceptr *out, size_t bytes, CUmemoryPool handle, bool any, CUstream stream_handle) {
    struct stream *stream;
    CUresult result = fake_enter_stream(stream_handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (out == NULL || bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    struct pool *pool = any ? fake_pool_current(stream->context->device) : fake_pool_of(handle);
    if (pool == NULL || pool->imported)
        result = CUDA_ERROR_INVALID_VALUE;
    else if (stream->capture != NULL) {
        struct node node = {.work.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC, .device = pool->device};
        fake_graph_place(stream->capture->graph, &node, bytes, stream->context);
        result = fake_capture_node(stream, &node);
        *out = node.address;
    } else {
        result = fake_order_call(stream);
        if (result == CUDA_SUCCESS)
            result = take(pool, stream, bytes, out);
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream stream) {
    return allocate(out, bytes, NULL, true, stream);
}

EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream) {
    return allocate(out, bytes, pool, false, stream);
}

/* Operation of a stream: frees a range of any kind, once the earlier work of the stream has ended. */
static void free_later(void *of) {
    fake_memory_return(of);
}

static void free_on(struct stream *stream, struct range *range) {
    if (range->kind != RANGE_POOL) {
        fake_submit(stream, (struct op){.kind = OP_RETURN, .call = free_later, .argument = range});
        return;
    }
    struct pool *pool = range->object;
    struct freed *freed = malloc(sizeof *freed);
    *freed = (struct freed){
        .pool = pool, .opened = range->opened, .stream = stream, .bytes = range->bytes, .next = pool->freed};
    pool->freed = freed;
    pool->used -= range->bytes;
    pool->returning += range->bytes;
    fake_range_remove(range);
    fake_submit(stream, (struct op){.kind = OP_RETURN, .call = over, .argument = freed});
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
    struct stream *stream;
    CUresult result = fake_enter_stream(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    struct range *range = fake_range_at(address);
    bool graphs = range != NULL && range->kind == RANGE_GRAPH;
    bool frees = range != NULL && (range->kind == RANGE_POOL || range->kind == RANGE_LINEAR || graphs);
    if (!frees || (stream->capture != NULL && !graphs))
        result = CUDA_ERROR_INVALID_VALUE;
    else if (stream->capture != NULL) {
        struct node node = {.work.type = CU_GRAPH_NODE_TYPE_MEM_FREE, .address = address, .device = range->device};
        result = fake_capture_node(stream, &node);
        fake_graph_frees(stream->capture->graph, address);
    } else {
        result = fake_order_call(stream);
        if (result == CUDA_SUCCESS && !graphs)
            free_on(stream, range);
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool handle, size_t keep) {
    pthread_mutex_lock(&fake_lock);
    struct pool *pool = fake_pool_of(handle);
    if (pool != NULL)
        trim(pool, keep);
    pthread_mutex_unlock(&fake_lock);
    return pool != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static uint64_t *figure(struct pool *pool, CUmemPool_attribute attribute) {
    switch (attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: return &pool->threshold;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: return pool->imported ? &pool->used : &pool->reserved;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: return &pool->reserved_high;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: return &pool->used;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH: return &pool->used_high;
    default: return NULL;
    }
}

EXPORT CUresult cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void *value) {
    pthread_mutex_lock(&fake_lock);
    CUresult result = fake_unsafe_call();
    struct pool *pool = fake_pool_of(handle);
    const uint64_t *bytes = pool == NULL ? NULL : figure(pool, attribute);
    if (pool == NULL || value == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    else if (result != CUDA_SUCCESS)
        ; /* in a capture */
    else if (bytes != NULL)
        *(cuuint64_t *)value = *bytes;
    else if (attribute >= 1 && attribute <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES)
        *(int *)value = pool->settings[attribute];
    else
        result = CUDA_ERROR_NOT_SUPPORTED;
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void *value) {
    pthread_mutex_lock(&fake_lock);
    CUresult result = fake_unsafe_call();
    struct pool *pool = fake_pool_of(handle);
    if (pool == NULL || value == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    else if (result != CUDA_SUCCESS)
        ; /* in a capture */
    else if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
        pool->threshold = *(const cuuint64_t *)value;
    else if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH && *(const cuuint64_t *)value == 0)
        pool->reserved_high = pool->reserved; /* high-water marks can only be reset */
    else if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH && *(const cuuint64_t *)value == 0)
        pool->used_high = pool->used;
    else if (attribute >= 1 && attribute <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES)
        pool->settings[attribute] = *(const int *)value;
    else
        result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *properties) {
    int device = -1;
    CUresult result = fake_initialized();
    if (result == CUDA_SUCCESS && (out == NULL || properties == NULL))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        result = fake_find_device(properties->location.id, &device);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    struct pool *pool = fake_pool_new(device, properties->maxSize, true);
    pool->handles = properties->handleTypes;
    *out = (CUmemoryPool)pool;
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}

/* A destroyed pool keeps its allocations until they are freed. */
EXPORT CUresult cuMemPoolDestroy(CUmemoryPool handle) {
    pthread_mutex_lock(&fake_lock);
    struct pool *pool = fake_pool_of(handle);
    bool destroys = pool != NULL && pool->own;
    if (destroys) {
        fake_pool_not_current(pool);
        pool->destroyed = true;
        trim(pool, 0);
        end_if_done(pool);
    }
    pthread_mutex_unlock(&fake_lock);
    return destroys ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
