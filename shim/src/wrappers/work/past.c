/* Wrapped copies from and to the host. They do not use the multiprocessors, so they bypass the gate (ungated work).
 * Before each copy, the hook records a fence behind metered launches into the stream, so that no drain waits for the
 * copy (D3, drain.h). */
#include "wrappers/work/passthrough.h"

#define PAST(symbol, stream, per_thread, parameters, ...)            \
    EXPORT CUresult symbol parameters {                              \
        PASSTHROUGH(false, symbol, stream, per_thread, __VA_ARGS__); \
    }

PAST(cuMemcpyHtoD, NULL, false, (CUdeviceptr_v1 dstDevice, const void *srcHost, unsigned int ByteCount), dstDevice,
     srcHost, ByteCount)
PAST(cuMemcpyHtoD_v2, NULL, false, (CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount), dstDevice, srcHost,
     ByteCount)
PAST(cuMemcpyHtoD_v2_ptds, NULL, true, (CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount), dstDevice,
     srcHost, ByteCount)
PAST(cuMemcpyHtoDAsync, hStream, false,
     (CUdeviceptr_v1 dstDevice, const void *srcHost, unsigned int ByteCount, CUstream hStream), dstDevice, srcHost,
     ByteCount, hStream)
PAST(cuMemcpyHtoDAsync_v2, hStream, false,
     (CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream), dstDevice, srcHost, ByteCount,
     hStream)
PAST(cuMemcpyHtoDAsync_v2_ptsz, hStream, true,
     (CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream), dstDevice, srcHost, ByteCount,
     hStream)
PAST(cuMemcpyDtoH, NULL, false, (void *dstHost, CUdeviceptr_v1 srcDevice, unsigned int ByteCount), dstHost, srcDevice,
     ByteCount)
PAST(cuMemcpyDtoH_v2, NULL, false, (void *dstHost, CUdeviceptr srcDevice, size_t ByteCount), dstHost, srcDevice,
     ByteCount)
PAST(cuMemcpyDtoH_v2_ptds, NULL, true, (void *dstHost, CUdeviceptr srcDevice, size_t ByteCount), dstHost, srcDevice,
     ByteCount)
PAST(cuMemcpyDtoHAsync, hStream, false,
     (void *dstHost, CUdeviceptr_v1 srcDevice, unsigned int ByteCount, CUstream hStream), dstHost, srcDevice, ByteCount,
     hStream)
PAST(cuMemcpyDtoHAsync_v2, hStream, false, (void *dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream),
     dstHost, srcDevice, ByteCount, hStream)
PAST(cuMemcpyDtoHAsync_v2_ptsz, hStream, true,
     (void *dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream), dstHost, srcDevice, ByteCount, hStream)
PAST(cuMemcpyHtoA, NULL, false, (CUarray dstArray, unsigned int dstOffset, const void *srcHost, unsigned int ByteCount),
     dstArray, dstOffset, srcHost, ByteCount)
PAST(cuMemcpyHtoA_v2, NULL, false, (CUarray dstArray, size_t dstOffset, const void *srcHost, size_t ByteCount),
     dstArray, dstOffset, srcHost, ByteCount)
PAST(cuMemcpyHtoA_v2_ptds, NULL, true, (CUarray dstArray, size_t dstOffset, const void *srcHost, size_t ByteCount),
     dstArray, dstOffset, srcHost, ByteCount)
PAST(cuMemcpyHtoAAsync, hStream, false,
     (CUarray dstArray, unsigned int dstOffset, const void *srcHost, unsigned int ByteCount, CUstream hStream),
     dstArray, dstOffset, srcHost, ByteCount, hStream)
PAST(cuMemcpyHtoAAsync_v2, hStream, false,
     (CUarray dstArray, size_t dstOffset, const void *srcHost, size_t ByteCount, CUstream hStream), dstArray, dstOffset,
     srcHost, ByteCount, hStream)
PAST(cuMemcpyHtoAAsync_v2_ptsz, hStream, true,
     (CUarray dstArray, size_t dstOffset, const void *srcHost, size_t ByteCount, CUstream hStream), dstArray, dstOffset,
     srcHost, ByteCount, hStream)
PAST(cuMemcpyAtoH, NULL, false, (void *dstHost, CUarray srcArray, unsigned int srcOffset, unsigned int ByteCount),
     dstHost, srcArray, srcOffset, ByteCount)
PAST(cuMemcpyAtoH_v2, NULL, false, (void *dstHost, CUarray srcArray, size_t srcOffset, size_t ByteCount), dstHost,
     srcArray, srcOffset, ByteCount)
PAST(cuMemcpyAtoH_v2_ptds, NULL, true, (void *dstHost, CUarray srcArray, size_t srcOffset, size_t ByteCount), dstHost,
     srcArray, srcOffset, ByteCount)
PAST(cuMemcpyAtoHAsync, hStream, false,
     (void *dstHost, CUarray srcArray, unsigned int srcOffset, unsigned int ByteCount, CUstream hStream), dstHost,
     srcArray, srcOffset, ByteCount, hStream)
PAST(cuMemcpyAtoHAsync_v2, hStream, false,
     (void *dstHost, CUarray srcArray, size_t srcOffset, size_t ByteCount, CUstream hStream), dstHost, srcArray,
     srcOffset, ByteCount, hStream)
PAST(cuMemcpyAtoHAsync_v2_ptsz, hStream, true,
     (void *dstHost, CUarray srcArray, size_t srcOffset, size_t ByteCount, CUstream hStream), dstHost, srcArray,
     srcOffset, ByteCount, hStream)
