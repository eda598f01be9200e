/* The hook's own calls of the driver. None of them synchronizes: cuCtxSynchronize would invalidate stream captures. */
#include "driver/own_calls.h"

#include "driver/entries.h"

CUstreamCaptureMode own_calls_begin(void) {
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (!HAS(cuThreadExchangeStreamCaptureMode) || DRIVER(cuThreadExchangeStreamCaptureMode)(&mode) != CUDA_SUCCESS)
        return CU_STREAM_CAPTURE_MODE_RELAXED;
    return mode;
}

void own_calls_end(CUstreamCaptureMode mode) {
    if (HAS(cuThreadExchangeStreamCaptureMode))
        DRIVER(cuThreadExchangeStreamCaptureMode)(&mode);
}

bool stream_is_capturing(CUstream stream, bool per_thread) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = CUDA_ERROR_NOT_FOUND;
    if (per_thread && HAS(cuStreamIsCapturing_ptsz))
        result = DRIVER(cuStreamIsCapturing_ptsz)(stream, &status);
    else if (HAS(cuStreamIsCapturing))
        result = DRIVER(cuStreamIsCapturing)(stream, &status);
    return result == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* Return the context of a stream that is no default one; a green context's is that context, which its events are made
 * in. NULL: the driver tells none. */
static CUcontext context_told(CUstream stream) {
    CUcontext context = NULL;
    CUgreenCtx green = NULL;
    if (HAS(cuStreamGetCtx_v2) && DRIVER(cuStreamGetCtx_v2)(stream, &context, &green) == CUDA_SUCCESS) {
        if (green == NULL)
            return context;
        return HAS(cuCtxFromGreenCtx) && DRIVER(cuCtxFromGreenCtx)(&context, green) == CUDA_SUCCESS ? context : NULL;
    }
    return HAS(cuStreamGetCtx) && DRIVER(cuStreamGetCtx)(stream, &context) == CUDA_SUCCESS ? context : NULL;
}

CUcontext context_of_stream(CUstream stream) {
    CUcontext context = stream_is_default(stream) ? NULL : context_told(stream);
    if (context != NULL)
        return context;
    return DRIVER(cuCtxGetCurrent)(&context) == CUDA_SUCCESS ? context : NULL;
}

unsigned long long context_number(CUcontext context) {
    unsigned long long number = 0;
    return HAS(cuCtxGetId) && DRIVER(cuCtxGetId)(context, &number) == CUDA_SUCCESS ? number : 0;
}

CUevent event_make(CUcontext context, unsigned flags) {
    CUevent event = NULL;
    CUcontext popped;
    if (DRIVER(cuCtxPushCurrent_v2)(context) != CUDA_SUCCESS)
        return NULL;
    if (DRIVER(cuEventCreate)(&event, flags) != CUDA_SUCCESS)
        event = NULL;
    DRIVER(cuCtxPopCurrent_v2)(&popped);
    return event;
}

/* An error of the context or of the device ends the work, too. Any other answer says nothing about the work, which then
 * counts as unfinished. */
bool work_over(CUresult answer) {
    switch (answer) {
    case CUDA_SUCCESS:
    case CUDA_ERROR_DEINITIALIZED:
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_CONTAINED:
    case CUDA_ERROR_INVALID_HANDLE:
    case CUDA_ERROR_EXTERNAL_DEVICE:
    case CUDA_ERROR_MPS_CLIENT_TERMINATED:
    case CUDA_ERROR_UNKNOWN: return true;
    default:
        return answer >= CUDA_ERROR_ILLEGAL_ADDRESS && answer <= CUDA_ERROR_TENSOR_MEMORY_LEAK; /* all of a context */
    }
}

bool event_passed(CUevent event, CUcontext context) {
    CUcontext popped;
    if (DRIVER(cuCtxPushCurrent_v2)(context) != CUDA_SUCCESS)
        return true; /* it is no context any more */
    CUresult result = DRIVER(cuEventQuery)(event);
    DRIVER(cuCtxPopCurrent_v2)(&popped);
    return work_over(result);
}
