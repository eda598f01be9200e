/* The wrapped memsets. They are kernels of the driver's own, whatever memory they fill: all pass the gate. */
#include "wrappers/work/passthrough.h"

EXPORT CUresult cuMemsetD16(CUdeviceptr_v1 dstDevice, unsigned short us, unsigned int N) {
    PASSTHROUGH(true, cuMemsetD16, NULL, false, dstDevice, us, N);
}

EXPORT CUresult cuMemsetD16_v2(CUdeviceptr dstDevice, unsigned short us, size_t N) {
    PASSTHROUGH(true, cuMemsetD16_v2, NULL, false, dstDevice, us, N);
}

EXPORT CUresult cuMemsetD16_v2_ptds(CUdeviceptr dstDevice, unsigned short us, size_t N) {
    PASSTHROUGH(true, cuMemsetD16_v2_ptds, NULL, true, dstDevice, us, N);
}

EXPORT CUresult cuMemsetD16Async(CUdeviceptr dstDevice, unsigned short us, size_t N, CUstream hStream) {
    PASSTHROUGH(true, cuMemsetD16Async, hStream, false, dstDevice, us, N, hStream);
}

EXPORT CUresult cuMemsetD16Async_ptsz(CUdeviceptr dstDevice, unsigned short us, size_t N, CUstream hStream) {
    PASSTHROUGH(true, cuMemsetD16Async_ptsz, hStream, true, dstDevice, us, N, hStream);
}

EXPORT CUresult cuMemsetD2D16(CUdeviceptr_v1 dstDevice, unsigned int dstPitch, unsigned short us, unsigned int Width,
                              unsigned int Height) {
    PASSTHROUGH(true, cuMemsetD2D16, NULL, false, dstDevice, dstPitch, us, Width, Height);
}

EXPORT CUresult cuMemsetD2D16_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width,
                                 size_t Height) {
    PASSTHROUGH(true, cuMemsetD2D16_v2, NULL, false, dstDevice, dstPitch, us, Width, Height);
}

EXPORT CUresult cuMemsetD2D16_v2_ptds(CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width,
                                      size_t Height) {
    PASSTHROUGH(true, cuMemsetD2D16_v2_ptds, NULL, true, dstDevice, dstPitch, us, Width, Height);
}

EXPORT CUresult cuMemsetD2D16Async(CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width,
                                   size_t Height, CUstream hStream) {
    PASSTHROUGH(true, cuMemsetD2D16Async, hStream, false, dstDevice, dstPitch, us, Width, Height, hStream);
}

EXPORT CUresult cuMemsetD2D16Async_ptsz(CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width,
                                        size_t Height, CUstream hStream) {
    PASSTHROUGH(true, cuMemsetD2D16Async_ptsz, hStream, true, dstDevice, dstPitch, us, Width, Height, hStream);
}

EXPORT CUresult cuMemsetD2D32(CUdeviceptr_v1 dstDevice, unsigned int dstPitch, unsigned int ui, unsigned int Width,
                              unsigned int Height) {
    PASSTHROUGH(true, cuMemsetD2D32, NULL, false, dstDevice, dstPitch, ui, Width, Height);
}

EXPORT CUresult cuMemsetD2D32_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height) {
    PASSTHROUGH(true, cuMemsetD2D32_v2, NULL, false, dstDevice, dstPitch, ui, Width, Height);
}

EXPORT CUresult cuMemsetD2D32_v2_ptds(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width,
                                      size_t Height) {
    PASSTHROUGH(true, cuMemsetD2D32_v2_ptds, NULL, true, dstDevice, dstPitch, ui, Width, Height);
}

EXPORT CUresult cuMemsetD2D32Async(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height,
                                   CUstream hStream) {
    PASSTHROUGH(true, cuMemsetD2D32Async, hStream, false, dstDevice, dstPitch, ui, Width, Height, hStream);
}

EXPORT CUresult cuMemsetD2D32Async_ptsz(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width,
                                        size_t Height, CUstream hStream) {
    PASSTHROUGH(true, cuMemsetD2D32Async_ptsz, hStream, true, dstDevice, dstPitch, ui, Width, Height, hStream);
}

EXPORT CUresult cuMemsetD2D8(CUdeviceptr_v1 dstDevice, unsigned int dstPitch, unsigned char uc, unsigned int Width,
                             unsigned int Height) {
    PASSTHROUGH(true, cuMemsetD2D8, NULL, false, dstDevice, dstPitch, uc, Width, Height);
}

EXPORT CUresult cuMemsetD2D8_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height) {
    PASSTHROUGH(true, cuMemsetD2D8_v2, NULL, false, dstDevice, dstPitch, uc, Width, Height);
}

EXPORT CUresult cuMemsetD2D8_v2_ptds(CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width,
                                     size_t Height) {
    PASSTHROUGH(true, cuMemsetD2D8_v2_ptds, NULL, true, dstDevice, dstPitch, uc, Width, Height);
}

EXPORT CUresult cuMemsetD2D8Async(CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height,
                                  CUstream hStream) {
    PASSTHROUGH(true, cuMemsetD2D8Async, hStream, false, dstDevice, dstPitch, uc, Width, Height, hStream);
}

EXPORT CUresult cuMemsetD2D8Async_ptsz(CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width,
                                       size_t Height, CUstream hStream) {
    PASSTHROUGH(true, cuMemsetD2D8Async_ptsz, hStream, true, dstDevice, dstPitch, uc, Width, Height, hStream);
}

EXPORT CUresult cuMemsetD32(CUdeviceptr_v1 dstDevice, unsigned int ui, unsigned int N) {
    PASSTHROUGH(true, cuMemsetD32, NULL, false, dstDevice, ui, N);
}

EXPORT CUresult cuMemsetD32_v2(CUdeviceptr dstDevice, unsigned int ui, size_t N) {
    PASSTHROUGH(true, cuMemsetD32_v2, NULL, false, dstDevice, ui, N);
}

EXPORT CUresult cuMemsetD32_v2_ptds(CUdeviceptr dstDevice, unsigned int ui, size_t N) {
    PASSTHROUGH(true, cuMemsetD32_v2_ptds, NULL, true, dstDevice, ui, N);
}

EXPORT CUresult cuMemsetD32Async(CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream) {
    PASSTHROUGH(true, cuMemsetD32Async, hStream, false, dstDevice, ui, N, hStream);
}

EXPORT CUresult cuMemsetD32Async_ptsz(CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream) {
    PASSTHROUGH(true, cuMemsetD32Async_ptsz, hStream, true, dstDevice, ui, N, hStream);
}

EXPORT CUresult cuMemsetD8(CUdeviceptr_v1 dstDevice, unsigned char uc, unsigned int N) {
    PASSTHROUGH(true, cuMemsetD8, NULL, false, dstDevice, uc, N);
}

EXPORT CUresult cuMemsetD8_v2(CUdeviceptr dstDevice, unsigned char uc, size_t N) {
    PASSTHROUGH(true, cuMemsetD8_v2, NULL, false, dstDevice, uc, N);
}

EXPORT CUresult cuMemsetD8_v2_ptds(CUdeviceptr dstDevice, unsigned char uc, size_t N) {
    PASSTHROUGH(true, cuMemsetD8_v2_ptds, NULL, true, dstDevice, uc, N);
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream) {
    PASSTHROUGH(true, cuMemsetD8Async, hStream, false, dstDevice, uc, N, hStream);
}

EXPORT CUresult cuMemsetD8Async_ptsz(CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream) {
    PASSTHROUGH(true, cuMemsetD8Async_ptsz, hStream, true, dstDevice, uc, N, hStream);
}
