/* Device memory of the double: addresses that nothing lies behind, sizes rounded up to 512 bytes, and transfers that
 * take time. */
#include <stdlib.h>

#include "fake.h"

enum { GRANULARITY = 512, TRANSFER_BYTES_PER_US = 20000, FILL_BYTES_PER_US = 1000000, PITCH = 512 };

struct allocation {
    CUdeviceptr address;
    uint64_t bytes;
    int device;
    struct allocation *next;
};

enum { BUCKETS = 4096 };
static struct allocation *allocations[BUCKETS];
static CUdeviceptr next_address = 0x700000000000;

static struct allocation **find(CUdeviceptr address) {
    struct allocation **at = &allocations[(address / GRANULARITY) % BUCKETS];
    while (*at != NULL && (*at)->address != address)
        at = &(*at)->next;
    return at;
}

static CUresult allocate(CUdeviceptr *out, size_t bytes) {
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    result = fake_unsafe_call();
    uint64_t rounded = (bytes + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
    if (result == CUDA_SUCCESS && (rounded < bytes || !fake_state_take(context->device, rounded)))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS) {
        struct allocation *allocation = malloc(sizeof *allocation);
        *allocation = (struct allocation){.address = next_address, .bytes = rounded, .device = context->device};
        next_address += rounded;
        *find(allocation->address) = allocation;
        *out = allocation->address;
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes) {
    return allocate(out, bytes);
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned int flags) {
    return flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST ? allocate(out, bytes)
                                                                        : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned int element) {
    (void)element;
    *pitch = (width + PITCH - 1) / PITCH * PITCH;
    return allocate(out, *pitch * height);
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS || address == 0)
        return result;
    pthread_mutex_lock(&fake_lock);
    result = fake_unsafe_call();
    struct allocation **at = find(address), *allocation = *at;
    if (result == CUDA_SUCCESS && allocation == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        fake_state_give(allocation->device, allocation->bytes);
        *at = allocation->next;
        free(allocation);
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    *free_bytes = fake_state_free(context->device);
    *total = fake_state_device(context->device)->memory;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAllocHost_v2(void **out, size_t bytes) {
    *out = malloc(bytes);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemFreeHost(void *memory) {
    free(memory);
    return CUDA_SUCCESS;
}

static CUresult transfer(CUstream handle, uint64_t duration, bool per_thread, bool wait) {
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    struct stream *stream = fake_stream(context, handle, per_thread);
    if (stream == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&fake_lock);
    result = fake_submit_kernel(stream, duration, false);
    if (result == CUDA_SUCCESS && wait)
        fake_wait_stream(stream);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

#define COPY_NS(bytes) ((uint64_t)(bytes) * 1000 / TRANSFER_BYTES_PER_US)
#define FILL_NS(bytes) ((uint64_t)(bytes) * 1000 / FILL_BYTES_PER_US)

#define TRANSFERS(suffix, stream_suffix, per_thread)                                                                   \
    EXPORT CUresult cuMemcpyHtoD_v2##suffix(CUdeviceptr to, const void *from, size_t n) {                              \
        (void)to, (void)from;                                                                                          \
        return transfer(NULL, COPY_NS(n), per_thread, true);                                                           \
    }                                                                                                                  \
    EXPORT CUresult cuMemcpyDtoH_v2##suffix(void *to, CUdeviceptr from, size_t n) {                                    \
        (void)to, (void)from;                                                                                          \
        return transfer(NULL, COPY_NS(n), per_thread, true);                                                           \
    }                                                                                                                  \
    EXPORT CUresult cuMemcpyDtoD_v2##suffix(CUdeviceptr to, CUdeviceptr from, size_t n) {                              \
        (void)to, (void)from;                                                                                          \
        return transfer(NULL, FILL_NS(n), per_thread, false);                                                          \
    }                                                                                                                  \
    EXPORT CUresult cuMemsetD8_v2##suffix(CUdeviceptr to, unsigned char value, size_t n) {                             \
        (void)to, (void)value;                                                                                         \
        return transfer(NULL, FILL_NS(n), per_thread, false);                                                          \
    }                                                                                                                  \
    EXPORT CUresult cuMemcpyHtoDAsync_v2##stream_suffix(CUdeviceptr to, const void *from, size_t n, CUstream stream) { \
        (void)to, (void)from;                                                                                          \
        return transfer(stream, COPY_NS(n), per_thread, false);                                                        \
    }                                                                                                                  \
    EXPORT CUresult cuMemcpyDtoHAsync_v2##stream_suffix(void *to, CUdeviceptr from, size_t n, CUstream stream) {       \
        (void)to, (void)from;                                                                                          \
        return transfer(stream, COPY_NS(n), per_thread, false);                                                        \
    }                                                                                                                  \
    EXPORT CUresult cuMemsetD8Async##stream_suffix(CUdeviceptr to, unsigned char value, size_t n, CUstream stream) {   \
        (void)to, (void)value;                                                                                         \
        return transfer(stream, FILL_NS(n), per_thread, false);                                                        \
    }

TRANSFERS(, , false)
TRANSFERS(_ptds, _ptsz, true)
