/* Linear and managed device memory (cuMemAlloc and similar calls), and host memory that is registered with CUDA.
 *
 * Sizes are rounded up to 512 bytes. The memory of a context ends with the context.
 */
#include "memory/memory.h"

#include <stdlib.h>
#include <string.h>

#include "memory/dmabuf.h"
#include "memory/pool.h"

enum { PITCH = 512 };

struct context *fake_memory_owner(struct context *context) {
    struct context *primary = (struct context *)fake_primary(context->device);
    return context->green && primary->alive ? primary : context;
}

CUresult fake_memory_take(struct context *context, enum fake_kind kind, enum range_kind range_kind, uint64_t bytes,
                          struct range **out) {
    uint64_t rounded = fake_round(bytes, GRANULARITY);
    if (rounded < bytes || !fake_state_take(context->device, kind, rounded))
        return CUDA_ERROR_OUT_OF_MEMORY;
    *out = fake_range_add((struct range){.bytes = rounded,
                                         .asked = bytes,
                                         .kind = range_kind,
                                         .device = context->device,
                                         .context = fake_memory_owner(context)},
                          GRANULARITY, 0);
    return CUDA_SUCCESS;
}

static bool taken(enum range_kind kind) {
    return kind == RANGE_LINEAR || kind == RANGE_MANAGED || kind == RANGE_GLOBAL;
}

static enum fake_kind kind_of(const struct range *range) {
    return range->kind == RANGE_MANAGED ? FAKE_MANAGED : range->kind == RANGE_GLOBAL ? FAKE_MODULE : FAKE_LINEAR;
}

void fake_memory_return(struct range *range) {
    if (range->kind == RANGE_GRAPH)
        return; /* memory of a graph: the executable graph keeps it for its next launch */
    if (range->kind == RANGE_POOL)
        fake_pool_return(range);
    else if (taken(range->kind) && !(range->kind == RANGE_LINEAR && fake_dmabuf_keeps(range))) {
        if (range->shared)
            fake_state_leave(range->id);
        fake_state_give(range->device, kind_of(range), range->bytes);
    }
    fake_range_remove(range);
}

void fake_memory_of_context_gone(struct context *context) {
    static const enum range_kind kinds[] = {RANGE_LINEAR, RANGE_MANAGED, RANGE_HOST};
    for (int i = 0; i < 3; i++)
        for (struct range *range; (range = fake_range_of_context(context, kinds[i])) != NULL;) {
            if (range->kind == RANGE_HOST)
                free(range->object);
            fake_memory_return(range);
        }
}

static CUresult allocate(CUdeviceptr *out, size_t bytes, bool managed) {
    struct context *context;
    struct range *range;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (bytes == 0 || out == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    result = fake_unsafe_call();
    if (result == CUDA_SUCCESS)
        result = fake_memory_take(context, managed ? FAKE_MANAGED : FAKE_LINEAR, managed ? RANGE_MANAGED : RANGE_LINEAR,
                                  bytes, &range);
    if (result == CUDA_SUCCESS)
        *out = range->address;
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes) {
    return allocate(out, bytes, false);
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned int flags) {
    return flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST ? allocate(out, bytes, true)
                                                                        : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned int element) {
    if (pitch == NULL || (element != 4 && element != 8 && element != 16))
        return CUDA_ERROR_INVALID_VALUE;
    size_t row = fake_round(width, PITCH);
    if (row < width || (height != 0 && row > SIZE_MAX / height))
        return fake_initialized() == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = allocate(out, row * height, false);
    if (result == CUDA_SUCCESS)
        *pitch = row;
    return result;
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS || address == 0)
        return result;
    pthread_mutex_lock(&fake_lock);
    result = fake_unsafe_call();
    struct range *range = fake_range_at(address);
    bool frees =
        range != NULL && (range->kind == RANGE_LINEAR || range->kind == RANGE_MANAGED || range->kind == RANGE_POOL ||
                          range->kind == RANGE_GRAPH || range->kind == RANGE_EXTERNAL);
    if (result == CUDA_SUCCESS && !frees)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && (range->kind == RANGE_LINEAR || range->kind == RANGE_MANAGED)) {
        fake_wait_context(range->context);
        range = fake_range_at(address); /* NULL: another thread has freed it during the wait */
    }
    if (result == CUDA_SUCCESS && range == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        fake_memory_return(range);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (free_bytes != NULL)
        *free_bytes = fake_state_free(context->device);
    if (total != NULL)
        *total = fake_state_device(context->device)->memory;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    const struct range *range = fake_range_holding(address);
    result = range == NULL ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
    if (range != NULL && base != NULL)
        *base = range->address;
    if (range != NULL && size != NULL)
        *size = range->asked;
    pthread_mutex_unlock(&fake_lock);
    return result;
}

/* Add host memory, at its own address and on no device. `owned`: memory that cuMemFreeHost must free. */
static CUresult add_host(void *memory, size_t bytes, void *owned) {
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (memory == NULL || bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct range range = {.bytes = bytes, .asked = bytes, .kind = RANGE_HOST, .context = context, .object = owned};
    pthread_mutex_lock(&fake_lock);
    result = fake_unsafe_call();
    if (result == CUDA_SUCCESS && fake_range_add(range, 1, (CUdeviceptr)(uintptr_t)memory) == NULL)
        result = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned int flags) {
    if (out == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    struct context *context;
    CUresult result = fake_enter(&context);
    (void)flags;
    if (result != CUDA_SUCCESS)
        return result;
    void *memory = bytes > 0 ? malloc(bytes) : NULL;
    if (memory == NULL)
        return bytes > 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
    result = add_host(memory, bytes, memory);
    if (result == CUDA_SUCCESS)
        *out = memory;
    else
        free(memory);
    return result;
}

EXPORT CUresult cuMemAllocHost_v2(void **out, size_t bytes) {
    if (out == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    return cuMemHostAlloc(out, bytes, 0);
}

EXPORT CUresult cuMemHostRegister_v2(void *memory, size_t bytes, unsigned int flags) {
    (void)flags;
    return add_host(memory, bytes, NULL);
}

static CUresult remove_host(void *memory, bool owned) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    struct range *range = fake_range_at((CUdeviceptr)(uintptr_t)memory);
    bool host = range != NULL && range->kind == RANGE_HOST;
    if (!host || (range->object != NULL) != owned)
        result = host || owned ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    else
        fake_range_remove(range);
    pthread_mutex_unlock(&fake_lock);
    if (result == CUDA_SUCCESS && owned)
        free(memory);
    return result;
}

EXPORT CUresult cuMemFreeHost(void *memory) {
    return memory == NULL ? fake_initialized() : remove_host(memory, true);
}

EXPORT CUresult cuMemHostUnregister(void *memory) {
    return remove_host(memory, false);
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *memory, unsigned int flags) {
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    const struct range *range = fake_range_holding((CUdeviceptr)(uintptr_t)memory);
    if (range == NULL || range->kind != RANGE_HOST || flags != 0)
        result = CUDA_ERROR_INVALID_VALUE;
    else
        *out = (CUdeviceptr)(uintptr_t)memory;
    pthread_mutex_unlock(&fake_lock);
    return result;
}
