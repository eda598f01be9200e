/* Copies, fills and prefetches of the double.
 *
 * Work on the device occupies the device for 1 ns per 1,000 bytes, and for at least 1 us: fills, copies between device
 * memory, arrays and peers, prefetches to a device, and decompression. A transfer with host memory takes 1 ns per 20
 * bytes, in parallel to the device. A synchronous call returns after a transfer with host memory has ended, but at once
 * for work on the device, like the real call. No bytes are copied, because no host memory is behind device addresses.
 */
#include "work/transfer.h"

#include "memory/array.h"

enum { DEVICE_BYTES_PER_NS = 1000, HOST_BYTES_PER_NS = 20, LEAST_DEVICE_NS = 1000 };

/* A longer transfer would exceed any address space, and is invalid. */
#define LONGEST_NS (1ull << 45)

enum manner { ASYNC, SYNC };

struct work fake_device_work(CUgraphNodeType type, uint64_t bytes) {
    uint64_t ns = bytes / DEVICE_BYTES_PER_NS;
    return (struct work){.type = type, .device_ns = ns < LEAST_DEVICE_NS ? LEAST_DEVICE_NS : ns};
}

struct work fake_copy_work(bool host, uint64_t bytes) {
    if (!host)
        return fake_device_work(CU_GRAPH_NODE_TYPE_MEMCPY, bytes);
    return (struct work){.type = CU_GRAPH_NODE_TYPE_MEMCPY, .copy_ns = bytes / HOST_BYTES_PER_NS + 1};
}

static CUresult submit(CUstream handle, struct work work, enum manner manner) {
    struct stream *stream;
    CUresult result = fake_enter_stream(handle, &stream);
    if (result == CUDA_SUCCESS && (work.copy_ns > LONGEST_NS || work.device_ns > LONGEST_NS))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    if (manner == ASYNC) {
        result = fake_submit_work(stream, &work);
    } else {
        bool waits = work.copy_ns > 0;
        result = waits ? fake_stream_sync_call(stream) : fake_not_captured(stream);
        if (result == CUDA_SUCCESS)
            fake_put_work(stream, &work);
        if (result == CUDA_SUCCESS && waits)
            fake_wait_stream(stream);
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

CUresult fake_submit_transfer(CUstream handle, struct work work) {
    return submit(handle, work, ASYNC);
}

bool fake_on_device(CUdeviceptr address, uint64_t bytes) {
    pthread_mutex_lock(&fake_lock);
    bool is = bytes == 0 || fake_range_on_device(address, bytes);
    pthread_mutex_unlock(&fake_lock);
    return is;
}

/* Return whether an address is host memory: every address that is not device memory. */
static bool host(CUdeviceptr address) {
    return !fake_on_device(address, 1);
}

static CUresult fill(CUdeviceptr to, uint64_t rows, uint64_t pitch, uint64_t width, CUstream stream,
                     enum manner manner) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    uint64_t last = 0;
    if (rows > 0 && width > 0 &&
        (__builtin_mul_overflow(rows - 1, pitch, &last) || __builtin_add_overflow(last, width, &last) ||
         !fake_on_device(to, last)))
        return CUDA_ERROR_INVALID_VALUE;
    return submit(stream, fake_device_work(CU_GRAPH_NODE_TYPE_MEMSET, rows * width), manner);
}

EXPORT CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t n) {
    (void)value;
    return fill(to, 1, n, n, NULL, SYNC);
}

EXPORT CUresult cuMemsetD16_v2(CUdeviceptr to, unsigned short value, size_t n) {
    (void)value;
    return fill(to, 1, 2 * n, 2 * n, NULL, SYNC);
}

EXPORT CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned int value, size_t n) {
    (void)value;
    return fill(to, 1, 4 * n, 4 * n, NULL, SYNC);
}

EXPORT CUresult cuMemsetD2D8_v2(CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height) {
    (void)value;
    return fill(to, height, pitch, width, NULL, SYNC);
}

EXPORT CUresult cuMemsetD2D16_v2(CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height) {
    (void)value;
    return fill(to, height, pitch, 2 * width, NULL, SYNC);
}

EXPORT CUresult cuMemsetD2D32_v2(CUdeviceptr to, size_t pitch, unsigned int value, size_t width, size_t height) {
    (void)value;
    return fill(to, height, pitch, 4 * width, NULL, SYNC);
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t n, CUstream stream) {
    (void)value;
    return fill(to, 1, n, n, stream, ASYNC);
}

EXPORT CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t n, CUstream stream) {
    (void)value;
    return fill(to, 1, 2 * n, 2 * n, stream, ASYNC);
}

EXPORT CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t n, CUstream stream) {
    (void)value;
    return fill(to, 1, 4 * n, 4 * n, stream, ASYNC);
}

EXPORT CUresult cuMemsetD2D8Async(CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height,
                                  CUstream stream) {
    (void)value;
    return fill(to, height, pitch, width, stream, ASYNC);
}

EXPORT CUresult cuMemsetD2D16Async(CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height,
                                   CUstream stream) {
    (void)value;
    return fill(to, height, pitch, 2 * width, stream, ASYNC);
}

EXPORT CUresult cuMemsetD2D32Async(CUdeviceptr to, size_t pitch, unsigned int value, size_t width, size_t height,
                                   CUstream stream) {
    (void)value;
    return fill(to, height, pitch, 4 * width, stream, ASYNC);
}

/* Copy between two addresses. `to_host`, `from_host`: true if that side is host memory. */
static CUresult copy_linear(CUdeviceptr to, CUdeviceptr from, bool to_host, bool from_host, size_t bytes,
                            CUstream stream, enum manner manner) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    if ((!to_host && !fake_on_device(to, bytes)) || (!from_host && !fake_on_device(from, bytes)))
        return CUDA_ERROR_INVALID_VALUE;
    return submit(stream, fake_copy_work(to_host || from_host, bytes), manner);
}

EXPORT CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t n) {
    return copy_linear(to, from, host(to), host(from), n, NULL, SYNC);
}

EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream stream) {
    return copy_linear(to, from, host(to), host(from), n, stream, ASYNC);
}

EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t n) {
    return copy_linear(to, (CUdeviceptr)(uintptr_t)from, false, true, n, NULL, SYNC);
}

EXPORT CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t n) {
    return copy_linear((CUdeviceptr)(uintptr_t)to, from, true, false, n, NULL, SYNC);
}

EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t n) {
    return copy_linear(to, from, false, false, n, NULL, SYNC);
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t n, CUstream stream) {
    return copy_linear(to, (CUdeviceptr)(uintptr_t)from, false, true, n, stream, ASYNC);
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t n, CUstream stream) {
    return copy_linear((CUdeviceptr)(uintptr_t)to, from, true, false, n, stream, ASYNC);
}

EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream stream) {
    return copy_linear(to, from, false, false, n, stream, ASYNC);
}

EXPORT CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t n) {
    if (!fake_is(to_context, MAGIC_CONTEXT) || !fake_is(from_context, MAGIC_CONTEXT))
        return CUDA_ERROR_INVALID_CONTEXT;
    return copy_linear(to, from, false, false, n, NULL, SYNC);
}

EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
                                  size_t n, CUstream stream) {
    if (!fake_is(to_context, MAGIC_CONTEXT) || !fake_is(from_context, MAGIC_CONTEXT))
        return CUDA_ERROR_INVALID_CONTEXT;
    return copy_linear(to, from, false, false, n, stream, ASYNC);
}

/* Copy between an array and an address. `to_host`: true if the address is host memory. */
static CUresult copy_array(CUarray array, size_t offset, CUdeviceptr pointer, bool to_host, size_t bytes,
                           CUstream stream, enum manner manner) {
    if (!fake_is(array, MAGIC_ARRAY))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!fake_array_holds(array, offset, bytes) || (to_host && pointer == 0))
        return CUDA_ERROR_INVALID_VALUE;
    if (!to_host && !fake_on_device(pointer, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    return submit(stream, fake_copy_work(to_host, bytes), manner);
}

EXPORT CUresult cuMemcpyDtoA_v2(CUarray to, size_t offset, CUdeviceptr from, size_t n) {
    return copy_array(to, offset, from, false, n, NULL, SYNC);
}

EXPORT CUresult cuMemcpyAtoD_v2(CUdeviceptr to, CUarray from, size_t offset, size_t n) {
    return copy_array(from, offset, to, false, n, NULL, SYNC);
}

EXPORT CUresult cuMemcpyAtoA_v2(CUarray to, size_t to_offset, CUarray from, size_t from_offset, size_t n) {
    if (!fake_is(to, MAGIC_ARRAY) || !fake_is(from, MAGIC_ARRAY))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!fake_array_holds(to, to_offset, n) || !fake_array_holds(from, from_offset, n))
        return CUDA_ERROR_INVALID_VALUE;
    return submit(NULL, fake_copy_work(false, n), SYNC);
}

EXPORT CUresult cuMemcpyHtoA_v2(CUarray to, size_t offset, const void *from, size_t n) {
    return copy_array(to, offset, (CUdeviceptr)(uintptr_t)from, true, n, NULL, SYNC);
}

EXPORT CUresult cuMemcpyAtoH_v2(void *to, CUarray from, size_t offset, size_t n) {
    return copy_array(from, offset, (CUdeviceptr)(uintptr_t)to, true, n, NULL, SYNC);
}

EXPORT CUresult cuMemcpyHtoAAsync_v2(CUarray to, size_t offset, const void *from, size_t n, CUstream stream) {
    return copy_array(to, offset, (CUdeviceptr)(uintptr_t)from, true, n, stream, ASYNC);
}

EXPORT CUresult cuMemcpyAtoHAsync_v2(void *to, CUarray from, size_t offset, size_t n, CUstream stream) {
    return copy_array(from, offset, (CUdeviceptr)(uintptr_t)to, true, n, stream, ASYNC);
}

/* Source or destination of a 2D or 3D copy: the fields that all descriptors of such copies have. */
struct side {
    CUmemorytype type;
    const void *host;
    CUdeviceptr device;
    CUarray array;
};

static CUresult look_at(const struct side *side, bool *host_side) {
    *host_side = false;
    switch (side->type) {
    case CU_MEMORYTYPE_HOST: *host_side = true; return side->host == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    case CU_MEMORYTYPE_DEVICE: return fake_on_device(side->device, 1) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_MEMORYTYPE_ARRAY: return fake_is(side->array, MAGIC_ARRAY) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_MEMORYTYPE_UNIFIED:
        *host_side = host(side->device);
        return side->device == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

static CUresult copy_box(struct side from, struct side to, uint64_t bytes, CUstream stream, enum manner manner) {
    bool from_host, to_host;
    CUresult result = fake_initialized();
    if (result == CUDA_SUCCESS)
        result = look_at(&from, &from_host);
    if (result == CUDA_SUCCESS)
        result = look_at(&to, &to_host);
    return result == CUDA_SUCCESS ? submit(stream, fake_copy_work(from_host || to_host, bytes), manner) : result;
}

static CUresult copy_2d(const CUDA_MEMCPY2D *c, CUstream stream, enum manner manner) {
    if (c == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    return copy_box((struct side){c->srcMemoryType, c->srcHost, c->srcDevice, c->srcArray},
                    (struct side){c->dstMemoryType, c->dstHost, c->dstDevice, c->dstArray}, c->WidthInBytes * c->Height,
                    stream, manner);
}

static CUresult copy_3d(const CUDA_MEMCPY3D *c, CUstream stream, enum manner manner) {
    if (c == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    return copy_box((struct side){c->srcMemoryType, c->srcHost, c->srcDevice, c->srcArray},
                    (struct side){c->dstMemoryType, c->dstHost, c->dstDevice, c->dstArray},
                    c->WidthInBytes * c->Height * c->Depth, stream, manner);
}

static CUresult copy_3d_peer(const CUDA_MEMCPY3D_PEER *c, CUstream stream, enum manner manner) {
    if (c == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    return copy_box((struct side){c->srcMemoryType, c->srcHost, c->srcDevice, c->srcArray},
                    (struct side){c->dstMemoryType, c->dstHost, c->dstDevice, c->dstArray},
                    c->WidthInBytes * c->Height * c->Depth, stream, manner);
}

EXPORT CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D *copied) {
    return copy_2d(copied, NULL, SYNC);
}

EXPORT CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *copied) {
    return copy_2d(copied, NULL, SYNC);
}

EXPORT CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *copied, CUstream stream) {
    return copy_2d(copied, stream, ASYNC);
}

EXPORT CUresult cuMemcpy3D_v2(const CUDA_MEMCPY3D *copied) {
    return copy_3d(copied, NULL, SYNC);
}

EXPORT CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *copied, CUstream stream) {
    return copy_3d(copied, stream, ASYNC);
}

EXPORT CUresult cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER *copied) {
    return copy_3d_peer(copied, NULL, SYNC);
}

EXPORT CUresult cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER *copied, CUstream stream) {
    return copy_3d_peer(copied, stream, ASYNC);
}
