/* Linear memory: cuMemAlloc, cuMemAllocManaged, cuMemAllocPitch, cuMemFree. */
#include "driver/entries.h"
#include "memory/charge.h"
#include "memory/credits.h"
#include "memory/state.h"
#include "process/process.h"
#include "wrappers/memory/current_gpu.h"
#include "wrappers/memory/refused.h"

/* Charge linear memory in the current context. If the pointer for the address is NULL, or the size is 0, nothing is
 * charged: the driver reports the error. */
static CUresult begin_linear(struct charge *charge, const void *address, uint64_t bytes) {
    CUcontext context;
    int place;
    charge->allocation = NULL;
    CUresult result = current_gpu(&context, &place);
    if (result != CUDA_SUCCESS || address == NULL || bytes == 0)
        return result;
    result = charge_begin(charge, context, place, memory_rounded(bytes, MEMORY_GRANULARITY));
    CUresult current = result != CUDA_SUCCESS ? current_gpu(NULL, &place) : CUDA_SUCCESS;
    return current != CUDA_SUCCESS ? current : result; /* an error of the context, which may have ended during the wait,
                                                          replaces the refusal */
}

/* Body of an allocating wrapper. `valid`: false if the driver would reject the other arguments; a refused call then
 * returns CUDA_ERROR_INVALID_VALUE, as the driver would. */
#define ALLOCATE(symbol, valid, bytes, address, ...)                                                         \
    struct charge charge;                                                                                    \
    CUresult result = begin_linear(&charge, address, bytes);                                                 \
    if (result == CUDA_ERROR_OUT_OF_MEMORY && !(valid))                                                      \
        return CUDA_ERROR_INVALID_VALUE;                                                                     \
    if (result != CUDA_SUCCESS)                                                                              \
        return REFUSED(result, address);                                                                     \
    result = HAS(symbol) ? DRIVER(symbol)(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND;                               \
    charge_end(&charge, result == CUDA_SUCCESS, ALLOCATION_LINEAR, result == CUDA_SUCCESS ? *(address) : 0); \
    return result

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
    ALLOCATE(cuMemAlloc_v2, true, bytes, address, address, bytes);
}

EXPORT CUresult cuMemAlloc(CUdeviceptr_v1 *address, unsigned int bytes) {
    ALLOCATE(cuMemAlloc, true, bytes, address, address, bytes);
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned int flags) {
    bool valid = flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST;
    ALLOCATE(cuMemAllocManaged, valid, bytes, address, address, bytes, flags);
}

/* Return the bytes to charge for pitched memory before the driver has chosen the pitch: rows are aligned to
 * MEMORY_GRANULARITY. */
static uint64_t pitched(uint64_t width, uint64_t height) {
    uint64_t pitch = memory_rounded(width, MEMORY_GRANULARITY);
    return height != 0 && pitch > UINT64_MAX / height ? UINT64_MAX / 2 : pitch * height;
}

/* Change a charge to the bytes that the driver has allocated. Return false if the limit does not allow them. */
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
    if (result == CUDA_ERROR_OUT_OF_MEMORY && element != 4 && element != 8 && element != 16)                  \
        return CUDA_ERROR_INVALID_VALUE;                                                                      \
    if (result != CUDA_SUCCESS)                                                                               \
        return REFUSED(result, address);                                                                      \
    result = HAS(symbol) ? DRIVER(symbol)(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND;                                \
    if (result == CUDA_SUCCESS && charge.allocation != NULL &&                                                \
        !adjust(&charge, memory_rounded((uint64_t)*(pitch) * (height), MEMORY_GRANULARITY))) {                \
        DRIVER(symbol_free)(*(address));                                                                      \
        *(address) = 0;                                                                                       \
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

/* Body of a freeing wrapper. Memory of a pool is not in the table, because it is counted with its pool. */
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
