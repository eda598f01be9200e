/* Hollow driver: every call returns at once, so the time of a call is the hook's time. Used by
 * benchmarks/hook_overhead.py and benchmarks/memory.py. HOLLOW_GPU: UUID of its devices, 32 hexadecimal digits.
 * HOLLOW_DEVICES: number of devices, by default 1. */
#include <cuda.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))
#define NOTHING(name, ...)              \
    EXPORT CUresult name(__VA_ARGS__) { \
        return CUDA_SUCCESS;            \
    }

static int context, event, pool;

NOTHING(cuInit, unsigned flags)
NOTHING(cuCtxSetCurrent, CUcontext set)
NOTHING(cuMemFree_v2, CUdeviceptr freed)
NOTHING(cuStreamDestroy_v2, CUstream destroyed)
NOTHING(cuMemPoolTrimTo, CUmemoryPool trimmed, size_t keep)
NOTHING(cuCtxPushCurrent_v2, CUcontext pushed)
NOTHING(cuEventDestroy_v2, CUevent destroyed)
NOTHING(cuEventRecord, CUevent recorded, CUstream stream)
NOTHING(cuEventQuery, CUevent queried)
NOTHING(cuStreamQuery, CUstream queried)
NOTHING(cuEventSynchronize, CUevent waited)
NOTHING(cuThreadExchangeStreamCaptureMode, CUstreamCaptureMode *mode)
NOTHING(cuLaunchKernel, CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
        unsigned shared, CUstream stream, void **parameters, void **extra)
NOTHING(cuGraphLaunch, CUgraphExec exec, CUstream stream)
NOTHING(cuMemcpyAsync, CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
NOTHING(cuMemcpyDtoDAsync_v2, CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)

/* The same functions under names that the hook does not wrap. Calls of them have the cost of a call without the hook.
 */
CUresult hollow_launch(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                       unsigned shared, CUstream stream, void **parameters, void **extra)
    __attribute__((alias("cuLaunchKernel"), visibility("default")));
CUresult hollow_graph(CUgraphExec exec, CUstream stream) __attribute__((alias("cuGraphLaunch"), visibility("default")));
CUresult hollow_copy(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
    __attribute__((alias("cuMemcpyAsync"), visibility("default")));

EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    (void)attribute, (void)address;
    *(unsigned *)value = CU_MEMORYTYPE_DEVICE;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *current) {
    *current = (CUcontext)&context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *popped) {
    *popped = (CUcontext)&context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetCtx(CUstream stream, CUcontext *of) {
    (void)stream;
    *of = (CUcontext)&context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventElapsedTime(float *milliseconds, CUevent begun, CUevent ended) {
    (void)begun, (void)ended;
    *milliseconds = 0.01f;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventCreate(CUevent *created, unsigned flags) {
    (void)flags;
    *created = (CUevent)&event;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *retained, CUdevice device) {
    (void)device;
    *retained = (CUcontext)&context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
    *device = 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count) {
    const char *text = getenv("HOLLOW_DEVICES");
    *count = text != NULL ? atoi(text) : 1;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    const char *text = getenv("HOLLOW_GPU");
    (void)device;
    for (unsigned i = 0; i < sizeof uuid->bytes; i++)
        if (text == NULL || sscanf(text + 2 * i, "%2hhx", (unsigned char *)&uuid->bytes[i]) != 1)
            return CUDA_ERROR_NOT_FOUND;
    return CUDA_SUCCESS;
}

/* Return a new address for each allocation; nothing is reserved. */
EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *allocated, size_t bytes) {
    static CUdeviceptr next = 0x700000000000;
    *allocated = next;
    next += bytes;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamCreate(CUstream *created, unsigned flags) {
    static _Atomic uintptr_t next = 0x1000;
    (void)flags;
    *created = (CUstream)atomic_fetch_add(&next, 0x10);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetMemPool(CUmemoryPool *current, CUdevice device) {
    (void)device;
    *current = (CUmemoryPool)&pool;
    return CUDA_SUCCESS;
}

/* Pool memory: the upper half of an address is the number of allocated bytes. The pool grows in steps of 32 MiB, and
 * never shrinks. */
static _Atomic uint64_t pool_used, pool_reserved;

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *allocated, size_t bytes, CUstream stream) {
    (void)stream;
    uint64_t used = atomic_fetch_add(&pool_used, bytes) + bytes, step = 32 << 20, reserved = pool_reserved;
    while (reserved < used && !atomic_compare_exchange_weak(&pool_reserved, &reserved, (used + step - 1) / step * step))
        ;
    *allocated = bytes << 16;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr freed, CUstream stream) {
    (void)stream;
    atomic_fetch_sub(&pool_used, freed >> 16);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolGetAttribute(CUmemoryPool of, CUmemPool_attribute attribute, void *value) {
    (void)of;
    switch (attribute) {
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: *(cuuint64_t *)value = pool_reserved; return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: *(cuuint64_t *)value = pool_used; return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}
