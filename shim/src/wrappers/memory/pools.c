/* Stream-ordered allocation: cuMemAllocAsync and the calls of memory pools.
 *
 * - A pool counts with the bytes that it has reserved on the device (C7, pool_memory.h).
 * - If a stream capture records an allocation, it becomes a memory node of the graph (graphmem.h).
 * - An imported pool is charged to the process that created it.
 */
#include "driver/entries.h"
#include "driver/own_calls.h"
#include "wrappers/memory/graphmem.h"
#include "memory/pools/pool_memory.h"
#include "memory/charge.h"
#include "memory/state.h"
#include "process/process.h"
#include "wrappers/memory/refused.h"

/* Get the device of a stream of a green context, for which the driver reports no context. */
static CUresult device_of_green(CUstream stream, CUdevice *device) {
    if (HAS(cuStreamGetDevice) && DRIVER(cuStreamGetDevice)(stream, device) == CUDA_SUCCESS)
        return CUDA_SUCCESS;
    return DRIVER(cuCtxGetDevice)(device);
}

/* Get the device of a stream. */
static CUresult device_of(CUstream stream, CUdevice *device) {
    CUcontext context, current, popped;
    if (atomic_load(&the_process->gate.contexts) == CONTEXTS_ONE) {
        *device = 0;
        return CUDA_SUCCESS;
    }
    CUresult result = DRIVER(cuCtxGetCurrent)(&current);
    if (result != CUDA_SUCCESS || stream_is_default(stream) || !HAS(cuStreamGetCtx) || !HAS(cuCtxGetDevice))
        return result != CUDA_SUCCESS ? result : DRIVER(cuCtxGetDevice)(device);
    result = DRIVER(cuStreamGetCtx)(stream, &context);
    if (result == CUDA_ERROR_NOT_SUPPORTED)
        return device_of_green(stream, device);
    if (result != CUDA_SUCCESS || context == current)
        return result != CUDA_SUCCESS ? result : DRIVER(cuCtxGetDevice)(device);
    result = DRIVER(cuCtxPushCurrent_v2)(context);
    if (result == CUDA_SUCCESS) {
        result = DRIVER(cuCtxGetDevice)(device);
        DRIVER(cuCtxPopCurrent_v2)(&popped);
    }
    return result;
}

/* Return the device of the memory node that a capture creates for an allocation: the pool's device if known, else
 * `device`. */
static CUdevice device_of_node(CUmemoryPool pool, CUdevice device) {
    const struct pool_memory *memory = pool != NULL ? pool_find(pool, device) : NULL;
    return memory != NULL && memory->origin != POOL_ELSEWHERE ? memory->device : device;
}

/* Charge an allocation from a pool; `pool` NULL: the device's current pool. call->memory stays NULL if nothing is
 * counted; the driver then decides. */
static CUresult begin(struct pool_call *call, const void *address, size_t bytes, CUmemoryPool pool, CUstream stream,
                      bool per_thread) {
    CUdevice device;
    call->memory = NULL;
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || address == NULL || bytes == 0)
        return result;
    bool capturing = atomic_load(&the_process->gate.captures) > 0 && stream_is_capturing(stream, per_thread);
    CUstreamCaptureMode mode = own_calls_begin();
    struct pool_memory *memory = NULL;
    if (device_of(stream, &device) == CUDA_SUCCESS) {
        if (capturing)
            graphmem_expect(device_of_node(pool, device));
        else if (pool != NULL || (pool = pool_current(device)) != NULL)
            memory = pool_find(pool, device);
    }
    own_calls_end(mode);
    if (memory == NULL || memory->origin == POOL_ELSEWHERE)
        return CUDA_SUCCESS;
    return pool_call_begin(call, memory, memory_rounded(bytes, MEMORY_GRANULARITY), REUSE_UNKNOWN)
               ? CUDA_SUCCESS
               : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Undo an allocation for which the pool grew over the limit: free it, and trim the pool. */
static void undo(const struct pool_memory *memory, CUdeviceptr address, CUstream stream, bool per_thread) {
    CUresult (*free)(CUdeviceptr, CUstream) = per_thread ? DRIVER(cuMemFreeAsync_ptsz) : DRIVER(cuMemFreeAsync);
    CUstreamCaptureMode mode = own_calls_begin();
    if (free != NULL)
        free(address, stream);
    if (HAS(cuMemPoolTrimTo))
        DRIVER(cuMemPoolTrimTo)(memory->pool, 0);
    own_calls_end(mode);
}

static CUresult end(struct pool_call *call, CUresult result, CUdeviceptr *address, CUstream stream, bool per_thread) {
    if (call->memory == NULL && result == CUDA_SUCCESS) /* a node of a captured graph, or memory that is not counted */
        kinds_forget(&memory_state()->kinds);
    else if (result == CUDA_SUCCESS)
        kinds_forget_host(&memory_state()->kinds, (uintptr_t)*address, call->bytes);
    if (call->memory == NULL || pool_call_end(call))
        return result;
    if (result == CUDA_SUCCESS)
        undo(call->memory, *address, stream, per_thread);
    pool_call_close(call);
    return REFUSED(CUDA_ERROR_OUT_OF_MEMORY, address);
}

#define ALLOCATE_ASYNC(symbol, pool, per_thread, ...)                          \
    struct pool_call call;                                                     \
    CUresult result = begin(&call, address, bytes, pool, stream, per_thread);  \
    if (result != CUDA_SUCCESS)                                                \
        return REFUSED(result, address);                                       \
    result = HAS(symbol) ? DRIVER(symbol)(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND; \
    return end(&call, result, address, stream, per_thread)

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream) {
    ALLOCATE_ASYNC(cuMemAllocAsync, NULL, false, address, bytes, stream);
}

EXPORT CUresult cuMemAllocAsync_ptsz(CUdeviceptr *address, size_t bytes, CUstream stream) {
    ALLOCATE_ASYNC(cuMemAllocAsync_ptsz, NULL, true, address, bytes, stream);
}

EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream) {
    ALLOCATE_ASYNC(cuMemAllocFromPoolAsync, pool, false, address, bytes, pool, stream);
}

EXPORT CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream) {
    ALLOCATE_ASYNC(cuMemAllocFromPoolAsync_ptsz, pool, true, address, bytes, pool, stream);
}

typedef CUresult (*free_call)(CUdeviceptr, CUstream);

/* Free memory on a stream: memory of a pool, which is counted with the pool, or linear memory, which is in the table.
 */
static CUresult free_async(free_call call, CUdeviceptr address, CUstream stream, bool per_thread) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS)
        return result;
    struct allocation *allocation = uncharge_begin(ALLOCATION_LINEAR, address);
    result = call != NULL ? call(address, stream) : CUDA_ERROR_NOT_FOUND;
    if (allocation == NULL)
        return result;
    if (result == CUDA_SUCCESS)
        freed_add(&the_process->freed, &the_process->streams, allocation, stream_named(stream, per_thread));
    else
        uncharge_end(allocation, false);
    return result;
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
    return free_async(DRIVER(cuMemFreeAsync), address, stream, false);
}

EXPORT CUresult cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream) {
    return free_async(DRIVER(cuMemFreeAsync_ptsz), address, stream, true);
}

/* Return whether a pool with these properties takes device memory. If so, get the device. */
static bool of_device(const CUmemPoolProps *properties, CUdevice *device) {
    switch ((int)properties->location.type) {
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT: return false;
    case CU_MEM_LOCATION_TYPE_DEVICE: *device = properties->location.id; return true;
    default: /* managed memory without a preferred location counts on the current device */
        if (!HAS(cuCtxGetDevice) || DRIVER(cuCtxGetDevice)(device) != CUDA_SUCCESS)
            *device = 0;
        return true;
    }
}

/* Register a pool that the driver has just created. If host memory is exhausted, destroy the pool. */
static CUresult known(CUmemoryPool pool, CUdevice device, enum pool_origin origin, uint64_t most) {
    if (pool_register(pool, device, origin, most) != NULL)
        return CUDA_SUCCESS;
    DRIVER(cuMemPoolDestroy)(pool);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties) {
    CUdevice device = 0;
    CUresult result = process_enter();
    if (result == CUDA_SUCCESS)
        result = HAS(cuMemPoolCreate) ? DRIVER(cuMemPoolCreate)(pool, properties) : CUDA_ERROR_NOT_FOUND;
    if (result != CUDA_SUCCESS)
        return result;
    enum pool_origin origin = properties->handleTypes != CU_MEM_HANDLE_TYPE_NONE ? POOL_SHAREABLE : POOL_MADE;
    if (!of_device(properties, &device))
        origin = POOL_ELSEWHERE;
    return known(*pool, device, origin, properties->maxSize);
}

EXPORT CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *pool, void *from, CUmemAllocationHandleType type,
                                                   unsigned long long flags) {
    CUresult result = process_enter();
    if (result == CUDA_SUCCESS)
        result = HAS(cuMemPoolImportFromShareableHandle)
                     ? DRIVER(cuMemPoolImportFromShareableHandle)(pool, from, type, flags)
                     : CUDA_ERROR_NOT_FOUND;
    return result == CUDA_SUCCESS ? known(*pool, 0, POOL_ELSEWHERE, 0) : result;
}

EXPORT CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || !HAS(cuMemPoolDestroy))
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    struct pool_memory *memory = pool_find_made(pool);
    return memory != NULL ? pool_destroy(memory) : DRIVER(cuMemPoolDestroy)(pool);
}

EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
    CUresult result = process_enter();
    if (result == CUDA_SUCCESS)
        result = HAS(cuMemPoolTrimTo) ? DRIVER(cuMemPoolTrimTo)(pool, keep) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS)
        pools_refresh(-1);
    return result;
}

/* Body of a wrapper of a call that changes a current pool: drop the stored current pools. */
#define SETS_POOL(symbol, ...)                                                 \
    CUresult result = process_enter();                                         \
    if (result != CUDA_SUCCESS)                                                \
        return result;                                                         \
    result = HAS(symbol) ? DRIVER(symbol)(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND; \
    pool_current_changed();                                                    \
    return result

EXPORT CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool) {
    SETS_POOL(cuDeviceSetMemPool, device, pool);
}

EXPORT CUresult cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool) {
    SETS_POOL(cuMemSetMemPool, location, type, pool);
}
