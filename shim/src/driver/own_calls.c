/* The hook's own driver calls. None of them synchronizes, because a cuCtxSynchronize would invalidate open stream
 * captures of the program.
 *
 * To hide calls means to switch the thread's capture mode to RELAXED, in which its calls do not invalidate captures. A
 * thread hides its calls only while a capture is open. To find out, it first increments `not_hidden`, then reads
 * `open_captures`. A thread that begins a capture first increments `open_captures`, then waits until `not_hidden` is 0.
 * So no call that is not hidden overlaps a capture.
 */
#include "driver/own_calls.h"

#include <stdatomic.h>

#include "base/sys.h"
#include "driver/entries.h"

/* Longest time, in ns, that the beginning of a capture waits for calls that are not hidden. Without this bound it would
 * wait for a thread that a debugger has stopped. */
#define SETTLE (30 * SYS_SECOND)
#define SETTLE_LOOK (20 * 1000ull)

#define NOT_HIDDEN ((CUstreamCaptureMode) - 1)
#define NOT_COUNTED ((CUstreamCaptureMode) - 2)

static _Atomic uint32_t open_captures, not_hidden; /* number of open captures; number of threads between own_calls_begin
                                                      and own_calls_end whose calls are not hidden */

static CUstreamCaptureMode hide(void) {
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (!HAS(cuThreadExchangeStreamCaptureMode) || DRIVER(cuThreadExchangeStreamCaptureMode)(&mode) != CUDA_SUCCESS)
        return CU_STREAM_CAPTURE_MODE_RELAXED;
    return mode;
}

CUstreamCaptureMode own_calls_begin(void) {
    atomic_fetch_add(&not_hidden, 1);
    if (atomic_load(&open_captures) == 0)
        return NOT_HIDDEN;
    atomic_fetch_sub(&not_hidden, 1);
    return hide();
}

CUstreamCaptureMode own_record_begin(void) {
    return atomic_load(&open_captures) == 0 ? NOT_COUNTED : hide();
}

void own_calls_end(CUstreamCaptureMode mode) {
    if (mode == NOT_COUNTED)
        return;
    if (mode == NOT_HIDDEN)
        atomic_fetch_sub(&not_hidden, 1);
    else if (HAS(cuThreadExchangeStreamCaptureMode))
        DRIVER(cuThreadExchangeStreamCaptureMode)(&mode);
}

void own_calls_set_captures(uint32_t captures) {
    atomic_store(&open_captures, captures);
}

void own_calls_settle(void) {
    uint64_t until = sys_now() + SETTLE;
    while (atomic_load(&not_hidden) > 0 && sys_now() < until)
        sys_sleep(SETTLE_LOOK);
}

void own_calls_after_fork(void) {
    atomic_store(&open_captures, 0);
    atomic_store(&not_hidden, 0);
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

/* Return the context of a stream that is no default stream; NULL: the driver does not know the stream. For a stream of
 * a green context, return the green context, in which the stream's events are created. */
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

/* The first attempt does not push the context, because in most threads it is current already. */
CUresult event_record(CUcontext context, CUevent event, CUstream stream) {
    CUcontext popped;
    CUresult result = DRIVER(cuEventRecord)(event, stream);
    if (result == CUDA_SUCCESS || DRIVER(cuCtxPushCurrent_v2)(context) != CUDA_SUCCESS)
        return result;
    result = DRIVER(cuEventRecord)(event, stream);
    DRIVER(cuCtxPopCurrent_v2)(&popped);
    return result;
}

/* An error of the context or the device also means that the work is over. After any other answer the work counts as
 * unfinished. */
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
        return answer >= CUDA_ERROR_ILLEGAL_ADDRESS &&
               answer <= CUDA_ERROR_TENSOR_MEMORY_LEAK; /* all errors of a context */
    }
}

bool event_passed(CUevent event, CUcontext context) {
    CUcontext popped;
    if (DRIVER(cuCtxPushCurrent_v2)(context) != CUDA_SUCCESS)
        return true; /* the context no longer exists */
    CUresult result = DRIVER(cuEventQuery)(event);
    DRIVER(cuCtxPopCurrent_v2)(&popped);
    return work_over(result);
}
