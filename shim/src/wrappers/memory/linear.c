/* The wrapped calls of linear memory, and of the tenant's view of a GPU's memory. */
#include "wrappers/memory/linear.h"

#include "driver/entries.h"
#include "memory/charge.h"
#include "memory/credits.h"
#include "memory/state.h"
#include "process/process.h"

CUresult memory_here(CUcontext *context, int *place) {
    CUdevice device;
    CUresult result = process_enter();
    if (result == CUDA_SUCCESS)
        result = HAS(cuCtxGetDevice) ? DRIVER(cuCtxGetDevice)(&device) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS && context != NULL)
        result = DRIVER(cuCtxGetCurrent)(context);
    if (result == CUDA_SUCCESS)
        *place = gpus_place(memory_state()->gpus, device);
    return result;
}

/* Linear memory of the current context. Without a place for the address, or of no bytes, the driver says what is wrong
 * with it. */
static CUresult begin_linear(struct charge *charge, const void *address, uint64_t bytes) {
    CUcontext context;
    int place;
    charge->allocation = NULL;
    CUresult result = memory_here(&context, &place);
    if (result != CUDA_SUCCESS || address == NULL || bytes == 0)
        return result;
    return charge_begin(charge, context, place, memory_rounded(bytes, MEMORY_GRANULARITY));
}

#define ALLOCATE(symbol, bytes, address, ...)                                                                \
    struct charge charge;                                                                                    \
    CUresult result = begin_linear(&charge, address, bytes);                                                 \
    if (result != CUDA_SUCCESS)                                                                              \
        return result;                                                                                       \
    result = HAS(symbol) ? DRIVER(symbol)(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND;                               \
    charge_end(&charge, result == CUDA_SUCCESS, ALLOCATION_LINEAR, result == CUDA_SUCCESS ? *(address) : 0); \
    return result

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
    ALLOCATE(cuMemAlloc_v2, bytes, address, address, bytes);
}

EXPORT CUresult cuMemAlloc(CUdeviceptr_v1 *address, unsigned int bytes) {
    ALLOCATE(cuMemAlloc, bytes, address, address, bytes);
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned int flags) {
    ALLOCATE(cuMemAllocManaged, bytes, address, address, bytes, flags);
}

/* The driver chooses the pitch. Reserved is what an alignment to MEMORY_GRANULARITY needs; then what it took counts. */
static uint64_t pitched(uint64_t width, uint64_t height) {
    uint64_t pitch = memory_rounded(width, MEMORY_GRANULARITY);
    return height != 0 && pitch > UINT64_MAX / height ? UINT64_MAX / 2 : pitch * height;
}

static bool adjust(struct charge *charge, uint64_t bytes) {
    struct allocation *allocation = charge->allocation;
    if (allocation == NULL || bytes == allocation->bytes)
        return true;
    if (bytes > allocation->bytes && !credits_reserve(allocation->place, bytes - allocation->bytes))
        return false;
    if (bytes < allocation->bytes)
        credits_return(allocation->place, allocation->bytes - bytes);
    allocation->bytes = bytes;
    return true;
}

#define ALLOCATE_PITCH(symbol, symbol_free, width, height, address, pitch, ...)                               \
    struct charge charge;                                                                                     \
    CUresult result = begin_linear(&charge, (address) && (pitch) ? (address) : NULL, pitched(width, height)); \
    if (result != CUDA_SUCCESS)                                                                               \
        return result;                                                                                        \
    result = HAS(symbol) ? DRIVER(symbol)(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND;                                \
    if (result == CUDA_SUCCESS && charge.allocation != NULL &&                                                \
        !adjust(&charge, memory_rounded((uint64_t)*(pitch) * (height), MEMORY_GRANULARITY))) {                \
        DRIVER(symbol_free)(*(address));                                                                      \
        result = CUDA_ERROR_OUT_OF_MEMORY;                                                                    \
    }                                                                                                         \
    charge_end(&charge, result == CUDA_SUCCESS, ALLOCATION_LINEAR, result == CUDA_SUCCESS ? *(address) : 0);  \
    return result

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height,
                                   unsigned int element) {
    ALLOCATE_PITCH(cuMemAllocPitch_v2, cuMemFree_v2, width, height, address, pitch, address, pitch, width, height,
                   element);
}

EXPORT CUresult cuMemAllocPitch(CUdeviceptr_v1 *address, unsigned *pitch, unsigned width, unsigned height,
                                unsigned element) {
    ALLOCATE_PITCH(cuMemAllocPitch, cuMemFree, width, height, address, pitch, address, pitch, width, height, element);
}

/* Also for what came from a pool: that is counted with the pool. */
#define FREE(symbol, address)                                                   \
    CUresult result = process_enter();                                          \
    if (result != CUDA_SUCCESS)                                                 \
        return result;                                                          \
    struct allocation *allocation = uncharge_begin(ALLOCATION_LINEAR, address); \
    result = HAS(symbol) ? DRIVER(symbol)(address) : CUDA_ERROR_NOT_FOUND;      \
    uncharge_end(allocation, result == CUDA_SUCCESS);                           \
    return result

EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
    FREE(cuMemFree_v2, address);
}

EXPORT CUresult cuMemFree(CUdeviceptr_v1 address) {
    FREE(cuMemFree, address);
}

bool memory_view(int place, uint64_t *limit, uint64_t *used) {
    return place >= 0 && credits_view(place, limit, used);
}

/* The tenant's view of a GPU's memory, never more than what the driver says. */
static void clip(int place, uint64_t *free_bytes, uint64_t *total) {
    uint64_t limit = 0, used = 0;
    if (place < 0 && gpus_ungated(memory_state()->gpus))
        return;
    if (place >= 0 && free_bytes == NULL) {
        struct gpus *gpus = memory_state()->gpus;
        lock(&gpus->lock);
        limit = gpus->gpus[place].enforced ? gpus->gpus[place].memory : UINT64_MAX;
        unlock(&gpus->lock);
    } else if (place >= 0 && !memory_view(place, &limit, &used)) {
        return;
    }
    if (total != NULL && *total > limit)
        *total = limit;
    uint64_t left = limit > used ? limit - used : 0;
    if (free_bytes != NULL && *free_bytes > left)
        *free_bytes = left;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    int place;
    CUresult result = memory_here(NULL, &place);
    if (result == CUDA_SUCCESS)
        result = HAS(cuMemGetInfo_v2) ? DRIVER(cuMemGetInfo_v2)(free_bytes, total) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS)
        clip(place, free_bytes, total);
    return result;
}

static unsigned saturated(uint64_t value) {
    return value > UINT32_MAX ? UINT32_MAX : (unsigned)value;
}

EXPORT CUresult cuMemGetInfo(unsigned *free_bytes, unsigned *total) {
    int place;
    CUresult result = memory_here(NULL, &place);
    if (result == CUDA_SUCCESS)
        result = HAS(cuMemGetInfo) ? DRIVER(cuMemGetInfo)(free_bytes, total) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS) {
        uint64_t wide_free = free_bytes ? *free_bytes : 0, wide_total = total ? *total : 0;
        clip(place, &wide_free, &wide_total);
        if (free_bytes != NULL)
            *free_bytes = saturated(wide_free);
        if (total != NULL)
            *total = saturated(wide_total);
    }
    return result;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    CUresult result = process_enter();
    if (result == CUDA_SUCCESS)
        result = HAS(cuDeviceTotalMem_v2) ? DRIVER(cuDeviceTotalMem_v2)(bytes, device) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS)
        clip(gpus_place(memory_state()->gpus, device), NULL, bytes);
    return result;
}

EXPORT CUresult cuDeviceTotalMem(unsigned *bytes, CUdevice device) {
    CUresult result = process_enter();
    if (result == CUDA_SUCCESS)
        result = HAS(cuDeviceTotalMem) ? DRIVER(cuDeviceTotalMem)(bytes, device) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS && bytes != NULL) {
        uint64_t wide = *bytes;
        clip(gpus_place(memory_state()->gpus, device), NULL, &wide);
        *bytes = saturated(wide);
    }
    return result;
}
