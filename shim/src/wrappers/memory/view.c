/* CUDA's byte counts of device memory: cuMemGetInfo and cuDeviceTotalMem show the tenant's limit and use.
 *
 * Guarantee: no byte count is larger than the driver's.
 */
#include "wrappers/memory/view.h"

#include "driver/entries.h"
#include "memory/credits.h"
#include "memory/state.h"
#include "process/process.h"
#include "wrappers/memory/current_gpu.h"

bool memory_view(int place, uint64_t *limit, uint64_t *used) {
    return place >= 0 && credits_view(place, limit, used);
}

/* Lower the driver's byte counts of a GPU to the tenant's limit, and to the unused part of it. Either pointer may be
 * NULL.
 */
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
    CUresult result = current_gpu(NULL, &place);
    if (result == CUDA_SUCCESS)
        result = HAS(cuMemGetInfo_v2) ? DRIVER(cuMemGetInfo_v2)(free_bytes, total) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS)
        clip(place, free_bytes, total);
    return result;
}

/* Return the value, or UINT32_MAX if it does not fit into the 32 bits of CUDA 3's calls. */
static unsigned saturated(uint64_t value) {
    return value > UINT32_MAX ? UINT32_MAX : (unsigned)value;
}

EXPORT CUresult cuMemGetInfo(unsigned *free_bytes, unsigned *total) {
    int place;
    CUresult result = current_gpu(NULL, &place);
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
