/* Wrapped calls whose work does not run on the multiprocessors: copies from and to the host, functions of the program,
 * and waits for values, events and semaphores. They bypass the gate (ungated work). Before each call, the hook records
 * a fence behind metered launches into the stream, so that no drain waits for the call's work (D3, drain.h). */
#include "driver/own_calls.h"
#include "time/streams.h"
#include "wrappers/work/passthrough.h"

#define PAST(symbol, stream, per_thread, parameters, ...)            \
    EXPORT CUresult symbol parameters {                              \
        PASSTHROUGH(false, symbol, stream, per_thread, __VA_ARGS__); \
    }

/* Before a wait that the program puts into the stream: record a fence behind the launches, then record the wait in the
 * registry (Q6, meter.h). Behind the wait the stream may be full. Return the error that the call must return, or
 * CUDA_SUCCESS. */
static CUresult before_wait(CUstream stream, bool per_thread) {
    CUresult refused = process_enter();
    if (refused != CUDA_SUCCESS)
        return refused;
    struct streams *streams = &the_process->streams;
    pass_by(stream, per_thread);
    atomic_store_explicit(&streams->holds, true, memory_order_relaxed);
    streams_hold(streams, stream_named(stream, per_thread), NULL);
    return CUDA_SUCCESS;
}

#define WAITS(symbol, stream, per_thread, parameters, ...)                         \
    EXPORT CUresult symbol parameters {                                            \
        CUresult result = before_wait(stream, per_thread);                         \
        if (result != CUDA_SUCCESS)                                                \
            return result;                                                         \
        result = HAS(symbol) ? DRIVER(symbol)(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND; \
        streams_held(&the_process->streams);                                       \
        return result;                                                             \
    }

/* A wait for an event of a capture makes the stream join that capture. So the stream's earlier launches are fenced (R5,
 * streams.h), and the drain ignores the stream during the call. Return whether streams_joined must follow the call. Set
 * `*refused` if there is no memory. */
static bool before_join(CUstream stream, bool per_thread, CUresult *refused) {
    if (atomic_load(&the_process->gate.captures) == 0)
        return false;
    pass_by(stream, per_thread); /* first, because a stream that may capture gets no fence for the drain */
    CUstreamCaptureMode mode = own_calls_begin();
    bool joins = !stream_is_capturing(stream, per_thread);
    if (joins && !streams_join(&the_process->streams, &the_process->gate, stream_named(stream, per_thread)))
        *refused = CUDA_ERROR_OUT_OF_MEMORY;
    own_calls_end(mode);
    return joins && *refused == CUDA_SUCCESS;
}

#define JOINS(symbol, per_thread)                                                                        \
    EXPORT CUresult symbol(CUstream stream, CUevent event, unsigned flags) {                             \
        CUresult result = process_enter();                                                               \
        bool joins = result == CUDA_SUCCESS && before_join(stream, per_thread, &result);                 \
        if (result != CUDA_SUCCESS)                                                                      \
            return result;                                                                               \
        pass_by(stream, per_thread);                                                                     \
        bool holds = atomic_load(&the_process->streams.holds);                                           \
        if (holds)                                                                                       \
            streams_hold(&the_process->streams, stream_named(stream, per_thread), NULL);                 \
        result = HAS(symbol) ? DRIVER(symbol)(stream, event, flags) : CUDA_ERROR_NOT_FOUND;              \
        if (holds)                                                                                       \
            streams_held(&the_process->streams);                                                         \
        if (joins)                                                                                       \
            streams_joined(&the_process->streams, &the_process->gate, stream_named(stream, per_thread)); \
        return result;                                                                                   \
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
WAITS(cuLaunchHostFunc, hStream, false, (CUstream hStream, CUhostFn fn, void *userData), hStream, fn, userData)
WAITS(cuLaunchHostFunc_ptsz, hStream, true, (CUstream hStream, CUhostFn fn, void *userData), hStream, fn, userData)
WAITS(cuLaunchHostFunc_v2, hStream, false, (CUstream hStream, CUhostFn fn, void *userData, unsigned int syncMode),
      hStream, fn, userData, syncMode)
WAITS(cuLaunchHostFunc_v2_ptsz, hStream, true, (CUstream hStream, CUhostFn fn, void *userData, unsigned int syncMode),
      hStream, fn, userData, syncMode)
WAITS(cuStreamAddCallback, hStream, false,
      (CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags), hStream, callback, userData,
      flags)
WAITS(cuStreamAddCallback_ptsz, hStream, true,
      (CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags), hStream, callback, userData,
      flags)
WAITS(cuStreamBatchMemOp, stream, false,
      (CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray, unsigned int flags), stream, count,
      paramArray, flags)
WAITS(cuStreamBatchMemOp_ptsz, stream, true,
      (CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray, unsigned int flags), stream, count,
      paramArray, flags)
WAITS(cuStreamBatchMemOp_v2, stream, false,
      (CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray, unsigned int flags), stream, count,
      paramArray, flags)
WAITS(cuStreamBatchMemOp_v2_ptsz, stream, true,
      (CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray, unsigned int flags), stream, count,
      paramArray, flags)
WAITS(cuStreamWaitValue32, stream, false, (CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags),
      stream, addr, value, flags)
WAITS(cuStreamWaitValue32_ptsz, stream, true, (CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags),
      stream, addr, value, flags)
WAITS(cuStreamWaitValue32_v2, stream, false, (CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags),
      stream, addr, value, flags)
WAITS(cuStreamWaitValue32_v2_ptsz, stream, true,
      (CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags), stream, addr, value, flags)
WAITS(cuStreamWaitValue64, stream, false, (CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags),
      stream, addr, value, flags)
WAITS(cuStreamWaitValue64_ptsz, stream, true, (CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags),
      stream, addr, value, flags)
WAITS(cuStreamWaitValue64_v2, stream, false, (CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags),
      stream, addr, value, flags)
WAITS(cuStreamWaitValue64_v2_ptsz, stream, true,
      (CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags), stream, addr, value, flags)
JOINS(cuStreamWaitEvent, false)
JOINS(cuStreamWaitEvent_ptsz, true)
WAITS(cuWaitExternalSemaphoresAsync, stream, false,
      (const CUexternalSemaphore *extSemArray, const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS *paramsArray,
       unsigned int numExtSems, CUstream stream),
      extSemArray, paramsArray, numExtSems, stream)
WAITS(cuWaitExternalSemaphoresAsync_ptsz, stream, true,
      (const CUexternalSemaphore *extSemArray, const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS *paramsArray,
       unsigned int numExtSems, CUstream stream),
      extSemArray, paramsArray, numExtSems, stream)

/* Before all streams of a context wait. Return whether streams_held is to follow the call. */
static bool before_context_waits(CUcontext context) {
    if (context == NULL)
        DRIVER(cuCtxGetCurrent)(&context);
    if (context != NULL)
        meter_before_ungated_context(&the_process->gate, &the_process->streams, context);
    bool holds = context != NULL && atomic_load(&the_process->streams.holds);
    if (holds)
        streams_hold(&the_process->streams, CU_STREAM_LEGACY, context);
    return holds;
}

EXPORT CUresult cuCtxWaitEvent(CUcontext hCtx, CUevent hEvent) {
    CUresult refused = process_enter();
    if (refused != CUDA_SUCCESS)
        return refused;
    bool holds = before_context_waits(hCtx);
    CUresult result = HAS(cuCtxWaitEvent) ? DRIVER(cuCtxWaitEvent)(hCtx, hEvent) : CUDA_ERROR_NOT_FOUND;
    if (holds)
        streams_held(&the_process->streams);
    return result;
}

EXPORT CUresult cuGreenCtxWaitEvent(CUgreenCtx hCtx, CUevent hEvent) {
    CUcontext context = NULL;
    CUresult refused = process_enter();
    if (refused != CUDA_SUCCESS)
        return refused;
    bool holds = HAS(cuCtxFromGreenCtx) && DRIVER(cuCtxFromGreenCtx)(&context, hCtx) == CUDA_SUCCESS &&
                 before_context_waits(context);
    CUresult result = HAS(cuGreenCtxWaitEvent) ? DRIVER(cuGreenCtxWaitEvent)(hCtx, hEvent) : CUDA_ERROR_NOT_FOUND;
    if (holds)
        streams_held(&the_process->streams);
    return result;
}
