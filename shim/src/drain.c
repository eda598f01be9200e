/* Waiting for the GPU work of a grant, by events: cuCtxSynchronize would invalidate stream captures, and cannot be
 * polled.
 *
 * One event behind a whole context where the driver has cuCtxRecordEvent (CUDA 12.5) and nothing is being captured;
 * else one behind each registered stream that does not capture. A capturing stream runs nothing: nothing is waited for.
 */
#include "process.h"
#include "streams.h"

static CUevent event_of(CUevent *event, CUcontext context) {
    if (*event == NULL)
        *event = streams_make_event(context);
    return *event;
}

static bool record_stream(struct known_stream *known) {
    CUstream stream = known->stream ? known->stream : CU_STREAM_LEGACY;
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (HAS(cuStreamIsCapturing) &&
        (DRIVER(cuStreamIsCapturing)(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE))
        return false; /* the legacy stream cannot be touched while a stream that waits for it captures */
    return event_of(&known->event, known->context) != NULL &&
           DRIVER(cuEventRecord)(known->event, stream) == CUDA_SUCCESS;
}

static void begin_context(struct streams *streams, struct known_context *known) {
    CUcontext popped;
    if (DRIVER(cuCtxPushCurrent_v2)(known->context) != CUDA_SUCCESS)
        return;
    known->waiting = HAS(cuCtxRecordEvent) && atomic_load(&the_process->gate.captures) == 0 &&
                     event_of(&known->event, known->context) != NULL &&
                     DRIVER(cuCtxRecordEvent)(known->context, known->event) == CUDA_SUCCESS;
    for (unsigned i = 0; i < streams->stream_count && !known->waiting; i++) {
        struct known_stream *stream = &streams->streams[i];
        if (stream->context == known->context && stream->pending)
            stream->waiting = record_stream(stream);
    }
    DRIVER(cuCtxPopCurrent_v2)(&popped);
}

void drain_begin(struct streams *streams) {
    CUstreamCaptureMode mode = streams_hide();
    lock(&streams->lock);
    for (unsigned i = 0; i < streams->context_count; i++)
        if (streams->contexts[i].context != NULL && streams->contexts[i].pending)
            begin_context(streams, &streams->contexts[i]);
    unlock(&streams->lock);
    streams_unhide(mode);
}

/* Whether the work before the event is over. An error of the context or the device ends it too; any other answer says
 * nothing about the work, which then counts as unfinished. */
static bool finished(CUevent event, CUcontext context) {
    CUcontext popped;
    if (DRIVER(cuCtxPushCurrent_v2)(context) != CUDA_SUCCESS)
        return true; /* it is no context any more */
    CUresult result = DRIVER(cuEventQuery)(event);
    DRIVER(cuCtxPopCurrent_v2)(&popped);
    switch (result) {
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
        return result >= CUDA_ERROR_ILLEGAL_ADDRESS && result <= CUDA_ERROR_TENSOR_MEMORY_LEAK; /* all of a context */
    }
}

bool drain_poll(struct streams *streams) {
    bool all = true;
    CUstreamCaptureMode mode = streams_hide();
    lock(&streams->lock);
    for (unsigned i = 0; i < streams->context_count && all; i++) {
        struct known_context *known = &streams->contexts[i];
        if (known->waiting)
            known->waiting = !finished(known->event, known->context);
        all = !known->waiting;
    }
    for (unsigned i = 0; i < streams->stream_count && all; i++) {
        struct known_stream *known = &streams->streams[i];
        if (!known->waiting)
            continue;
        known->waiting = !finished(known->event, known->context);
        if (!known->waiting && known->stream == STREAM_ORPHAN) {
            DRIVER(cuEventDestroy_v2)(known->event);
            *known = (struct known_stream){0};
        }
        all = !known->waiting;
    }
    unlock(&streams->lock);
    streams_unhide(mode);
    return all;
}

void drain_end(struct streams *streams) {
    lock(&streams->lock);
    for (unsigned i = 0; i < streams->context_count; i++)
        streams->contexts[i].pending = false;
    for (unsigned i = 0; i < streams->stream_count; i++)
        streams->streams[i].pending = false;
    unlock(&streams->lock);
}
