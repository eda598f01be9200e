/* The wrapped copies. A copy between device memories passes the gate. A copy from or to the host does not: it takes no
 * time of the multiprocessors, and a program may load its next batch while it waits for the token.
 *
 * Where the call itself does not say which it is, the driver is asked what the pointers are. A pointer that the driver
 * does not know is pageable host memory.
 */
#include "wrappers/work/passthrough.h"
#include "time/streams.h"

static bool on_device(CUdeviceptr address) {
    unsigned int type = 0;
    if (!HAS(cuPointerGetAttribute))
        return true;
    return DRIVER(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) == CUDA_SUCCESS &&
           type != CU_MEMORYTYPE_HOST;
}

/* Return whether a capture records the call: then it runs nothing. No capture elsewhere is disturbed (R3). */
static bool captured(CUstream stream, bool per_thread) {
    return atomic_load(&the_process->gate.captures) > 0 && stream_is_capturing(stream, per_thread);
}

/* Return whether a copy of addresses runs between device memories. */
static bool between(CUdeviceptr to, CUdeviceptr from, CUstream stream, bool per_thread) {
    if (captured(stream, per_thread))
        return false;
    CUstreamCaptureMode mode = own_calls_begin();
    bool runs = on_device(to) && on_device(from);
    own_calls_end(mode);
    return runs;
}

/* Return whether a batch has a copy between device memories: one makes the batch wait. */
static bool batch_between(const CUdeviceptr *to, const CUdeviceptr *from, size_t count, CUstream stream,
                          bool per_thread) {
    if (to == NULL || from == NULL || captured(stream, per_thread))
        return false;
    bool runs = false;
    CUstreamCaptureMode mode = own_calls_begin();
    for (size_t i = 0; i < count && !runs; i++)
        runs = on_device(to[i]) && on_device(from[i]);
    own_calls_end(mode);
    return runs;
}

static bool operand_on_device(const CUmemcpy3DOperand *operand) {
    return operand->type == CU_MEMCPY_OPERAND_TYPE_ARRAY || on_device(operand->op.ptr.ptr);
}

static bool operands_between(const CUDA_MEMCPY3D_BATCH_OP *copies, size_t count, CUstream stream, bool per_thread) {
    if (copies == NULL || captured(stream, per_thread))
        return false;
    bool runs = false;
    CUstreamCaptureMode mode = own_calls_begin();
    for (size_t i = 0; i < count && !runs; i++)
        runs = operand_on_device(&copies[i].dst) && operand_on_device(&copies[i].src);
    own_calls_end(mode);
    return runs;
}

static bool side_on_device(CUmemorytype type, CUdeviceptr unified) {
    return type == CU_MEMORYTYPE_UNIFIED ? on_device(unified) : type != CU_MEMORYTYPE_HOST;
}

static bool described_between(CUmemorytype to, CUdeviceptr to_address, CUmemorytype from, CUdeviceptr from_address,
                              CUstream stream, bool per_thread) {
    if (captured(stream, per_thread))
        return false;
    CUstreamCaptureMode mode = own_calls_begin();
    bool runs = side_on_device(to, to_address) && side_on_device(from, from_address);
    own_calls_end(mode);
    return runs;
}

/* The same of a copy with a descriptor; without one the driver shall say what is wrong. */
#define DESCRIBED(copy, stream, per_thread)                                                               \
    ((copy) != NULL && described_between((copy)->dstMemoryType, (copy)->dstDevice, (copy)->srcMemoryType, \
                                         (copy)->srcDevice, stream, per_thread))

EXPORT CUresult cuFabricCpyBatchAsync(size_t numOps, CUDA_FABRIC_COPY_BATCH_OP *opList, unsigned long long flags,
                                      CUstream hStream) {
    PASSTHROUGH(true, cuFabricCpyBatchAsync, hStream, false, numOps, opList, flags, hStream);
}

EXPORT CUresult cuFabricCpyBatchAsync_ptsz(size_t numOps, CUDA_FABRIC_COPY_BATCH_OP *opList, unsigned long long flags,
                                           CUstream hStream) {
    PASSTHROUGH(true, cuFabricCpyBatchAsync_ptsz, hStream, true, numOps, opList, flags, hStream);
}

EXPORT CUresult cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount) {
    PASSTHROUGH(between(dst, src, NULL, false), cuMemcpy, NULL, false, dst, src, ByteCount);
}

EXPORT CUresult cuMemcpy_ptds(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount) {
    PASSTHROUGH(between(dst, src, NULL, true), cuMemcpy_ptds, NULL, true, dst, src, ByteCount);
}

EXPORT CUresult cuMemcpy2D(const CUDA_MEMCPY2D_v1 *pCopy) {
    PASSTHROUGH(DESCRIBED(pCopy, NULL, false), cuMemcpy2D, NULL, false, pCopy);
}

EXPORT CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D *pCopy) {
    PASSTHROUGH(DESCRIBED(pCopy, NULL, false), cuMemcpy2D_v2, NULL, false, pCopy);
}

EXPORT CUresult cuMemcpy2D_v2_ptds(const CUDA_MEMCPY2D *pCopy) {
    PASSTHROUGH(DESCRIBED(pCopy, NULL, true), cuMemcpy2D_v2_ptds, NULL, true, pCopy);
}

EXPORT CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D_v1 *pCopy, CUstream hStream) {
    PASSTHROUGH(DESCRIBED(pCopy, hStream, false), cuMemcpy2DAsync, hStream, false, pCopy, hStream);
}

EXPORT CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *pCopy, CUstream hStream) {
    PASSTHROUGH(DESCRIBED(pCopy, hStream, false), cuMemcpy2DAsync_v2, hStream, false, pCopy, hStream);
}

EXPORT CUresult cuMemcpy2DAsync_v2_ptsz(const CUDA_MEMCPY2D *pCopy, CUstream hStream) {
    PASSTHROUGH(DESCRIBED(pCopy, hStream, true), cuMemcpy2DAsync_v2_ptsz, hStream, true, pCopy, hStream);
}

EXPORT CUresult cuMemcpy2DUnaligned(const CUDA_MEMCPY2D_v1 *pCopy) {
    PASSTHROUGH(DESCRIBED(pCopy, NULL, false), cuMemcpy2DUnaligned, NULL, false, pCopy);
}

EXPORT CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *pCopy) {
    PASSTHROUGH(DESCRIBED(pCopy, NULL, false), cuMemcpy2DUnaligned_v2, NULL, false, pCopy);
}

EXPORT CUresult cuMemcpy2DUnaligned_v2_ptds(const CUDA_MEMCPY2D *pCopy) {
    PASSTHROUGH(DESCRIBED(pCopy, NULL, true), cuMemcpy2DUnaligned_v2_ptds, NULL, true, pCopy);
}

EXPORT CUresult cuMemcpy3D(const CUDA_MEMCPY3D_v1 *pCopy) {
    PASSTHROUGH(DESCRIBED(pCopy, NULL, false), cuMemcpy3D, NULL, false, pCopy);
}

EXPORT CUresult cuMemcpy3D_v2(const CUDA_MEMCPY3D *pCopy) {
    PASSTHROUGH(DESCRIBED(pCopy, NULL, false), cuMemcpy3D_v2, NULL, false, pCopy);
}

EXPORT CUresult cuMemcpy3D_v2_ptds(const CUDA_MEMCPY3D *pCopy) {
    PASSTHROUGH(DESCRIBED(pCopy, NULL, true), cuMemcpy3D_v2_ptds, NULL, true, pCopy);
}

EXPORT CUresult cuMemcpy3DAsync(const CUDA_MEMCPY3D_v1 *pCopy, CUstream hStream) {
    PASSTHROUGH(DESCRIBED(pCopy, hStream, false), cuMemcpy3DAsync, hStream, false, pCopy, hStream);
}

EXPORT CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *pCopy, CUstream hStream) {
    PASSTHROUGH(DESCRIBED(pCopy, hStream, false), cuMemcpy3DAsync_v2, hStream, false, pCopy, hStream);
}

EXPORT CUresult cuMemcpy3DAsync_v2_ptsz(const CUDA_MEMCPY3D *pCopy, CUstream hStream) {
    PASSTHROUGH(DESCRIBED(pCopy, hStream, true), cuMemcpy3DAsync_v2_ptsz, hStream, true, pCopy, hStream);
}

EXPORT CUresult cuMemcpy3DBatchAsync(size_t numOps, CUDA_MEMCPY3D_BATCH_OP *opList, size_t *failIdx,
                                     unsigned long long flags, CUstream hStream) {
    PASSTHROUGH(operands_between(opList, numOps, hStream, false), cuMemcpy3DBatchAsync, hStream, false, numOps, opList,
                failIdx, flags, hStream);
}

EXPORT CUresult cuMemcpy3DBatchAsync_ptsz(size_t numOps, CUDA_MEMCPY3D_BATCH_OP *opList, size_t *failIdx,
                                          unsigned long long flags, CUstream hStream) {
    PASSTHROUGH(operands_between(opList, numOps, hStream, true), cuMemcpy3DBatchAsync_ptsz, hStream, true, numOps,
                opList, failIdx, flags, hStream);
}

EXPORT CUresult cuMemcpy3DBatchAsync_v2(size_t numOps, CUDA_MEMCPY3D_BATCH_OP *opList, unsigned long long flags,
                                        CUstream hStream) {
    PASSTHROUGH(operands_between(opList, numOps, hStream, false), cuMemcpy3DBatchAsync_v2, hStream, false, numOps,
                opList, flags, hStream);
}

EXPORT CUresult cuMemcpy3DBatchAsync_v2_ptsz(size_t numOps, CUDA_MEMCPY3D_BATCH_OP *opList, unsigned long long flags,
                                             CUstream hStream) {
    PASSTHROUGH(operands_between(opList, numOps, hStream, true), cuMemcpy3DBatchAsync_v2_ptsz, hStream, true, numOps,
                opList, flags, hStream);
}

EXPORT CUresult cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER *pCopy) {
    PASSTHROUGH(DESCRIBED(pCopy, NULL, false), cuMemcpy3DPeer, NULL, false, pCopy);
}

EXPORT CUresult cuMemcpy3DPeer_ptds(const CUDA_MEMCPY3D_PEER *pCopy) {
    PASSTHROUGH(DESCRIBED(pCopy, NULL, true), cuMemcpy3DPeer_ptds, NULL, true, pCopy);
}

EXPORT CUresult cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER *pCopy, CUstream hStream) {
    PASSTHROUGH(DESCRIBED(pCopy, hStream, false), cuMemcpy3DPeerAsync, hStream, false, pCopy, hStream);
}

EXPORT CUresult cuMemcpy3DPeerAsync_ptsz(const CUDA_MEMCPY3D_PEER *pCopy, CUstream hStream) {
    PASSTHROUGH(DESCRIBED(pCopy, hStream, true), cuMemcpy3DPeerAsync_ptsz, hStream, true, pCopy, hStream);
}

EXPORT CUresult cuMemcpy3DWithAttributesAsync(CUDA_MEMCPY3D_BATCH_OP *op, unsigned long long flags, CUstream hStream) {
    PASSTHROUGH(operands_between(op, 1, hStream, false), cuMemcpy3DWithAttributesAsync, hStream, false, op, flags,
                hStream);
}

EXPORT CUresult cuMemcpy3DWithAttributesAsync_ptsz(CUDA_MEMCPY3D_BATCH_OP *op, unsigned long long flags,
                                                   CUstream hStream) {
    PASSTHROUGH(operands_between(op, 1, hStream, true), cuMemcpy3DWithAttributesAsync_ptsz, hStream, true, op, flags,
                hStream);
}

EXPORT CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream) {
    PASSTHROUGH(between(dst, src, hStream, false), cuMemcpyAsync, hStream, false, dst, src, ByteCount, hStream);
}

EXPORT CUresult cuMemcpyAsync_ptsz(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream) {
    PASSTHROUGH(between(dst, src, hStream, true), cuMemcpyAsync_ptsz, hStream, true, dst, src, ByteCount, hStream);
}

EXPORT CUresult cuMemcpyAtoA(CUarray dstArray, unsigned int dstOffset, CUarray srcArray, unsigned int srcOffset,
                             unsigned int ByteCount) {
    PASSTHROUGH(true, cuMemcpyAtoA, NULL, false, dstArray, dstOffset, srcArray, srcOffset, ByteCount);
}

EXPORT CUresult cuMemcpyAtoA_v2(CUarray dstArray, size_t dstOffset, CUarray srcArray, size_t srcOffset,
                                size_t ByteCount) {
    PASSTHROUGH(true, cuMemcpyAtoA_v2, NULL, false, dstArray, dstOffset, srcArray, srcOffset, ByteCount);
}

EXPORT CUresult cuMemcpyAtoA_v2_ptds(CUarray dstArray, size_t dstOffset, CUarray srcArray, size_t srcOffset,
                                     size_t ByteCount) {
    PASSTHROUGH(true, cuMemcpyAtoA_v2_ptds, NULL, true, dstArray, dstOffset, srcArray, srcOffset, ByteCount);
}

EXPORT CUresult cuMemcpyAtoD(CUdeviceptr_v1 dstDevice, CUarray srcArray, unsigned int srcOffset,
                             unsigned int ByteCount) {
    PASSTHROUGH(true, cuMemcpyAtoD, NULL, false, dstDevice, srcArray, srcOffset, ByteCount);
}

EXPORT CUresult cuMemcpyAtoD_v2(CUdeviceptr dstDevice, CUarray srcArray, size_t srcOffset, size_t ByteCount) {
    PASSTHROUGH(true, cuMemcpyAtoD_v2, NULL, false, dstDevice, srcArray, srcOffset, ByteCount);
}

EXPORT CUresult cuMemcpyAtoD_v2_ptds(CUdeviceptr dstDevice, CUarray srcArray, size_t srcOffset, size_t ByteCount) {
    PASSTHROUGH(true, cuMemcpyAtoD_v2_ptds, NULL, true, dstDevice, srcArray, srcOffset, ByteCount);
}

EXPORT CUresult cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                   CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs, size_t *failIdx,
                                   CUstream hStream) {
    PASSTHROUGH(batch_between(dsts, srcs, count, hStream, false), cuMemcpyBatchAsync, hStream, false, dsts, srcs, sizes,
                count, attrs, attrsIdxs, numAttrs, failIdx, hStream);
}

EXPORT CUresult cuMemcpyBatchAsync_ptsz(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                        CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs, size_t *failIdx,
                                        CUstream hStream) {
    PASSTHROUGH(batch_between(dsts, srcs, count, hStream, true), cuMemcpyBatchAsync_ptsz, hStream, true, dsts, srcs,
                sizes, count, attrs, attrsIdxs, numAttrs, failIdx, hStream);
}

EXPORT CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                      CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs, CUstream hStream) {
    PASSTHROUGH(batch_between(dsts, srcs, count, hStream, false), cuMemcpyBatchAsync_v2, hStream, false, dsts, srcs,
                sizes, count, attrs, attrsIdxs, numAttrs, hStream);
}

EXPORT CUresult cuMemcpyBatchAsync_v2_ptsz(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                           CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs,
                                           CUstream hStream) {
    PASSTHROUGH(batch_between(dsts, srcs, count, hStream, true), cuMemcpyBatchAsync_v2_ptsz, hStream, true, dsts, srcs,
                sizes, count, attrs, attrsIdxs, numAttrs, hStream);
}

EXPORT CUresult cuMemcpyDtoA(CUarray dstArray, unsigned int dstOffset, CUdeviceptr_v1 srcDevice,
                             unsigned int ByteCount) {
    PASSTHROUGH(true, cuMemcpyDtoA, NULL, false, dstArray, dstOffset, srcDevice, ByteCount);
}

EXPORT CUresult cuMemcpyDtoA_v2(CUarray dstArray, size_t dstOffset, CUdeviceptr srcDevice, size_t ByteCount) {
    PASSTHROUGH(true, cuMemcpyDtoA_v2, NULL, false, dstArray, dstOffset, srcDevice, ByteCount);
}

EXPORT CUresult cuMemcpyDtoA_v2_ptds(CUarray dstArray, size_t dstOffset, CUdeviceptr srcDevice, size_t ByteCount) {
    PASSTHROUGH(true, cuMemcpyDtoA_v2_ptds, NULL, true, dstArray, dstOffset, srcDevice, ByteCount);
}

EXPORT CUresult cuMemcpyDtoD(CUdeviceptr_v1 dstDevice, CUdeviceptr_v1 srcDevice, unsigned int ByteCount) {
    PASSTHROUGH(true, cuMemcpyDtoD, NULL, false, dstDevice, srcDevice, ByteCount);
}

EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount) {
    PASSTHROUGH(true, cuMemcpyDtoD_v2, NULL, false, dstDevice, srcDevice, ByteCount);
}

EXPORT CUresult cuMemcpyDtoD_v2_ptds(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount) {
    PASSTHROUGH(true, cuMemcpyDtoD_v2_ptds, NULL, true, dstDevice, srcDevice, ByteCount);
}

EXPORT CUresult cuMemcpyDtoDAsync(CUdeviceptr_v1 dstDevice, CUdeviceptr_v1 srcDevice, unsigned int ByteCount,
                                  CUstream hStream) {
    PASSTHROUGH(true, cuMemcpyDtoDAsync, hStream, false, dstDevice, srcDevice, ByteCount, hStream);
}

EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream) {
    PASSTHROUGH(true, cuMemcpyDtoDAsync_v2, hStream, false, dstDevice, srcDevice, ByteCount, hStream);
}

EXPORT CUresult cuMemcpyDtoDAsync_v2_ptsz(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount,
                                          CUstream hStream) {
    PASSTHROUGH(true, cuMemcpyDtoDAsync_v2_ptsz, hStream, true, dstDevice, srcDevice, ByteCount, hStream);
}

EXPORT CUresult cuMemcpyPeer(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext,
                             size_t ByteCount) {
    PASSTHROUGH(true, cuMemcpyPeer, NULL, false, dstDevice, dstContext, srcDevice, srcContext, ByteCount);
}

EXPORT CUresult cuMemcpyPeer_ptds(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice,
                                  CUcontext srcContext, size_t ByteCount) {
    PASSTHROUGH(true, cuMemcpyPeer_ptds, NULL, true, dstDevice, dstContext, srcDevice, srcContext, ByteCount);
}

EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice,
                                  CUcontext srcContext, size_t ByteCount, CUstream hStream) {
    PASSTHROUGH(true, cuMemcpyPeerAsync, hStream, false, dstDevice, dstContext, srcDevice, srcContext, ByteCount,
                hStream);
}

EXPORT CUresult cuMemcpyPeerAsync_ptsz(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice,
                                       CUcontext srcContext, size_t ByteCount, CUstream hStream) {
    PASSTHROUGH(true, cuMemcpyPeerAsync_ptsz, hStream, true, dstDevice, dstContext, srcDevice, srcContext, ByteCount,
                hStream);
}

EXPORT CUresult cuMemcpyWithAttributesAsync(CUdeviceptr dst, CUdeviceptr src, size_t size, CUmemcpyAttributes *attr,
                                            CUstream hStream) {
    PASSTHROUGH(between(dst, src, hStream, false), cuMemcpyWithAttributesAsync, hStream, false, dst, src, size, attr,
                hStream);
}

EXPORT CUresult cuMemcpyWithAttributesAsync_ptsz(CUdeviceptr dst, CUdeviceptr src, size_t size,
                                                 CUmemcpyAttributes *attr, CUstream hStream) {
    PASSTHROUGH(between(dst, src, hStream, true), cuMemcpyWithAttributesAsync_ptsz, hStream, true, dst, src, size, attr,
                hStream);
}
