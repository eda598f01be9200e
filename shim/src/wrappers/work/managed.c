/* The wrapped moves of managed memory, and decompression by the device. They pass the gate, but for moves to the host,
 * which are host copies (see copies.c).
 */
#include "wrappers/work/passthrough.h"

/* Return whether any of the locations is a device. */
static bool any_device(const CUmemLocation *locations, size_t count) {
    for (size_t i = 0; locations != NULL && i < count; i++)
        if (locations[i].type == CU_MEM_LOCATION_TYPE_DEVICE)
            return true;
    return false;
}

EXPORT CUresult cuMemBatchDecompressAsync(CUmemDecompressParams *paramsArray, size_t count, unsigned int flags,
                                          size_t *errorIndex, CUstream stream) {
    PASSTHROUGH(true, cuMemBatchDecompressAsync, stream, false, paramsArray, count, flags, errorIndex, stream);
}

EXPORT CUresult cuMemBatchDecompressAsync_ptsz(CUmemDecompressParams *paramsArray, size_t count, unsigned int flags,
                                               size_t *errorIndex, CUstream stream) {
    PASSTHROUGH(true, cuMemBatchDecompressAsync_ptsz, stream, true, paramsArray, count, flags, errorIndex, stream);
}

EXPORT CUresult cuMemDiscardAndPrefetchBatchAsync(CUdeviceptr *dptrs, size_t *sizes, size_t count,
                                                  CUmemLocation *prefetchLocs, size_t *prefetchLocIdxs,
                                                  size_t numPrefetchLocs, unsigned long long flags, CUstream hStream) {
    PASSTHROUGH(any_device(prefetchLocs, numPrefetchLocs), cuMemDiscardAndPrefetchBatchAsync, hStream, false, dptrs,
                sizes, count, prefetchLocs, prefetchLocIdxs, numPrefetchLocs, flags, hStream);
}

EXPORT CUresult cuMemDiscardAndPrefetchBatchAsync_ptsz(CUdeviceptr *dptrs, size_t *sizes, size_t count,
                                                       CUmemLocation *prefetchLocs, size_t *prefetchLocIdxs,
                                                       size_t numPrefetchLocs, unsigned long long flags,
                                                       CUstream hStream) {
    PASSTHROUGH(any_device(prefetchLocs, numPrefetchLocs), cuMemDiscardAndPrefetchBatchAsync_ptsz, hStream, true, dptrs,
                sizes, count, prefetchLocs, prefetchLocIdxs, numPrefetchLocs, flags, hStream);
}

EXPORT CUresult cuMemPrefetchAsync(CUdeviceptr devPtr, size_t count, CUdevice dstDevice, CUstream hStream) {
    PASSTHROUGH(dstDevice != CU_DEVICE_CPU, cuMemPrefetchAsync, hStream, false, devPtr, count, dstDevice, hStream);
}

EXPORT CUresult cuMemPrefetchAsync_ptsz(CUdeviceptr devPtr, size_t count, CUdevice dstDevice, CUstream hStream) {
    PASSTHROUGH(dstDevice != CU_DEVICE_CPU, cuMemPrefetchAsync_ptsz, hStream, true, devPtr, count, dstDevice, hStream);
}

EXPORT CUresult cuMemPrefetchAsync_v2(CUdeviceptr devPtr, size_t count, CUmemLocation location, unsigned int flags,
                                      CUstream hStream) {
    PASSTHROUGH(location.type == CU_MEM_LOCATION_TYPE_DEVICE, cuMemPrefetchAsync_v2, hStream, false, devPtr, count,
                location, flags, hStream);
}

EXPORT CUresult cuMemPrefetchAsync_v2_ptsz(CUdeviceptr devPtr, size_t count, CUmemLocation location, unsigned int flags,
                                           CUstream hStream) {
    PASSTHROUGH(location.type == CU_MEM_LOCATION_TYPE_DEVICE, cuMemPrefetchAsync_v2_ptsz, hStream, true, devPtr, count,
                location, flags, hStream);
}

EXPORT CUresult cuMemPrefetchBatchAsync(CUdeviceptr *dptrs, size_t *sizes, size_t count, CUmemLocation *prefetchLocs,
                                        size_t *prefetchLocIdxs, size_t numPrefetchLocs, unsigned long long flags,
                                        CUstream hStream) {
    PASSTHROUGH(any_device(prefetchLocs, numPrefetchLocs), cuMemPrefetchBatchAsync, hStream, false, dptrs, sizes, count,
                prefetchLocs, prefetchLocIdxs, numPrefetchLocs, flags, hStream);
}

EXPORT CUresult cuMemPrefetchBatchAsync_ptsz(CUdeviceptr *dptrs, size_t *sizes, size_t count,
                                             CUmemLocation *prefetchLocs, size_t *prefetchLocIdxs,
                                             size_t numPrefetchLocs, unsigned long long flags, CUstream hStream) {
    PASSTHROUGH(any_device(prefetchLocs, numPrefetchLocs), cuMemPrefetchBatchAsync_ptsz, hStream, true, dptrs, sizes,
                count, prefetchLocs, prefetchLocIdxs, numPrefetchLocs, flags, hStream);
}
