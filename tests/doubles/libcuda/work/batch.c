/* Batches of copies, prefetches and discards, and decompression: one call is one operation of the stream.
 *
 * It takes the time of all its bytes, by the rates of transfer.c. If one copy of a batch is from or to host memory, the
 * whole batch counts as a transfer with host memory. As the headers specify, batches of copies fail in the legacy
 * default stream.
 */
#include "memory/array.h"
#include "work/transfer.h"

static bool legacy(CUstream stream) {
    return stream == CU_STREAM_LEGACY || (stream == NULL && !fake_per_thread);
}

EXPORT CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count,
                                      CUmemcpyAttributes *attributes, size_t *firsts, size_t attribute_count,
                                      CUstream stream) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    if (count == 0 || legacy(stream) || attribute_count == 0 || attribute_count > count || attributes == NULL ||
        firsts == NULL || firsts[0] != 0 || to == NULL || from == NULL || sizes == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t bytes = 0;
    bool host = false;
    for (size_t i = 0; i < count; i++) {
        if (to[i] == 0 || from[i] == 0 || sizes[i] == 0)
            return CUDA_ERROR_INVALID_VALUE;
        bytes += sizes[i];
        host |= !fake_on_device(to[i], sizes[i]) || !fake_on_device(from[i], sizes[i]);
    }
    return fake_submit_transfer(stream, fake_copy_work(host, bytes));
}

EXPORT CUresult cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count,
                                   CUmemcpyAttributes *attributes, size_t *firsts, size_t attribute_count,
                                   size_t *failed, CUstream stream) {
    CUresult result = cuMemcpyBatchAsync_v2(to, from, sizes, count, attributes, firsts, attribute_count, stream);
    if (result != CUDA_SUCCESS && failed != NULL)
        *failed = SIZE_MAX; /* as in CUDA: the error is not of a single copy */
    return result;
}

EXPORT CUresult cuMemcpyWithAttributesAsync(CUdeviceptr to, CUdeviceptr from, size_t size,
                                            CUmemcpyAttributes *attributes, CUstream stream) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    if (attributes == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    bool host = !fake_on_device(to, size) || !fake_on_device(from, size);
    return fake_submit_transfer(stream, fake_copy_work(host, size));
}

/* Return whether an operand of a copy is host memory. `*element`: set to the bytes of an array's element. `*valid`: set
 * to false if the operand is invalid. */
static bool operand(const CUmemcpy3DOperand *side, uint64_t *element, bool *valid) {
    if (side->type == CU_MEMCPY_OPERAND_TYPE_ARRAY) {
        *valid &= fake_is(side->op.array.array, MAGIC_ARRAY);
        if (*valid)
            *element = fake_array_element_bytes(side->op.array.array);
        return false;
    }
    *valid &= side->op.ptr.ptr != 0;
    return !fake_on_device(side->op.ptr.ptr, 1);
}

static CUresult boxes(size_t count, const CUDA_MEMCPY3D_BATCH_OP *ops, unsigned long long flags, CUstream stream) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    if (count == 0 || ops == NULL || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t bytes = 0;
    bool host = false, valid = true;
    for (size_t i = 0; i < count && valid; i++) {
        uint64_t element = 1;
        host |= operand(&ops[i].src, &element, &valid);
        host |= operand(&ops[i].dst, &element, &valid);
        uint64_t box = ops[i].extent.width * ops[i].extent.height * ops[i].extent.depth;
        valid &= box != 0;
        bytes += box * element;
    }
    return valid ? fake_submit_transfer(stream, fake_copy_work(host, bytes)) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemcpy3DBatchAsync_v2(size_t count, CUDA_MEMCPY3D_BATCH_OP *ops, unsigned long long flags,
                                        CUstream stream) {
    return legacy(stream) && fake_initialized() == CUDA_SUCCESS ? CUDA_ERROR_INVALID_VALUE
                                                                : boxes(count, ops, flags, stream);
}

EXPORT CUresult cuMemcpy3DBatchAsync(size_t count, CUDA_MEMCPY3D_BATCH_OP *ops, size_t *failed,
                                     unsigned long long flags, CUstream stream) {
    CUresult result = cuMemcpy3DBatchAsync_v2(count, ops, flags, stream);
    if (result != CUDA_SUCCESS && failed != NULL)
        *failed = SIZE_MAX;
    return result;
}

EXPORT CUresult cuMemcpy3DWithAttributesAsync(CUDA_MEMCPY3D_BATCH_OP *op, unsigned long long flags, CUstream stream) {
    return boxes(1, op, flags, stream);
}

/* Prefetch managed memory: to a device it takes device time, to the host it is a copy. */
static CUresult prefetch(CUdeviceptr *addresses, const size_t *sizes, size_t count, bool to_host, CUstream stream) {
    CUresult result = fake_initialized();
    uint64_t bytes = 0;
    if (addresses == NULL || sizes == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++) {
        pthread_mutex_lock(&fake_lock);
        const struct range *range = fake_range_holding(addresses[i]);
        if (range == NULL || range->kind != RANGE_MANAGED || sizes[i] == 0 ||
            sizes[i] > range->address + range->bytes - addresses[i])
            result = CUDA_ERROR_INVALID_VALUE;
        pthread_mutex_unlock(&fake_lock);
        bytes += sizes[i];
    }
    return result == CUDA_SUCCESS ? fake_submit_transfer(stream, fake_copy_work(to_host, bytes)) : result;
}

static bool host_location(const CUmemLocation *location) {
    return location->type != CU_MEM_LOCATION_TYPE_DEVICE;
}

EXPORT CUresult cuMemPrefetchAsync(CUdeviceptr address, size_t bytes, CUdevice device, CUstream stream) {
    return prefetch(&address, &bytes, 1, device == CU_DEVICE_CPU, stream);
}

EXPORT CUresult cuMemPrefetchAsync_v2(CUdeviceptr address, size_t bytes, CUmemLocation location, unsigned int flags,
                                      CUstream stream) {
    return flags != 0 ? CUDA_ERROR_INVALID_VALUE : prefetch(&address, &bytes, 1, host_location(&location), stream);
}

EXPORT CUresult cuMemPrefetchBatchAsync(CUdeviceptr *addresses, size_t *sizes, size_t count, CUmemLocation *locations,
                                        size_t *firsts, size_t location_count, unsigned long long flags,
                                        CUstream stream) {
    if (count == 0 || location_count == 0 || location_count > count || firsts == NULL || firsts[0] != 0 || flags != 0 ||
        locations == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    bool to_host = true;
    for (size_t i = 0; i < location_count; i++)
        to_host &= host_location(&locations[i]);
    return prefetch(addresses, sizes, count, to_host, stream);
}

EXPORT CUresult cuMemDiscardBatchAsync(CUdeviceptr *addresses, size_t *sizes, size_t count, unsigned long long flags,
                                       CUstream stream) {
    return count == 0 || flags != 0 ? CUDA_ERROR_INVALID_VALUE : prefetch(addresses, sizes, count, false, stream);
}

EXPORT CUresult cuMemDiscardAndPrefetchBatchAsync(CUdeviceptr *addresses, size_t *sizes, size_t count,
                                                  CUmemLocation *locations, size_t *firsts, size_t location_count,
                                                  unsigned long long flags, CUstream stream) {
    return cuMemPrefetchBatchAsync(addresses, sizes, count, locations, firsts, location_count, flags, stream);
}

EXPORT CUresult cuMemAdvise(CUdeviceptr address, size_t bytes, CUmem_advise advice, CUdevice device) {
    CUresult result = fake_initialized();
    (void)advice, (void)device;
    return result != CUDA_SUCCESS || fake_on_device(address, bytes) ? result : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemAdvise_v2(CUdeviceptr address, size_t bytes, CUmem_advise advice, CUmemLocation location) {
    (void)location;
    return cuMemAdvise(address, bytes, advice, 0);
}

EXPORT CUresult cuMemBatchDecompressAsync(CUmemDecompressParams *parameters, size_t count, unsigned int flags,
                                          size_t *failed, CUstream stream) {
    uint64_t bytes = 0;
    if (parameters == NULL || count == 0 || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        if (parameters[i].dst == NULL || parameters[i].src == NULL)
            return CUDA_ERROR_INVALID_VALUE;
        bytes += parameters[i].dstNumBytes;
    }
    if (failed != NULL)
        *failed = SIZE_MAX;
    return fake_submit_transfer(stream, fake_device_work(CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, bytes));
}
