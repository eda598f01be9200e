/* Waiting for the GPU work of a grant, by events: cuCtxSynchronize would invalidate stream captures, and cannot be
 * polled.
 *
 * One event behind a whole context where the driver has cuCtxRecordEvent (CUDA 12.5) and nothing is being captured;
 * else one behind each registered stream that does not capture. A capturing stream runs nothing, and what it ran before
 * was fenced when the capture began.
 */
#include "process/process.h"
#include "time/streams.h"

static CUevent event_of(CUevent *event, CUcontext context) {
    if (*event == NULL)
        *event = streams_make_event(context, CU_EVENT_DISABLE_TIMING);
    return *event;
}

static void begin_context(struct streams *streams, struct known_context *known) {
    CUcontext popped;
    if (DRIVER(cuCtxPushCurrent_v2)(known->context) != CUDA_SUCCESS)
        return;
    bool recorded = HAS(cuCtxRecordEvent) && atomic_load(&the_process->gate.captures) == 0 &&
                    event_of(&known->event, known->context) != NULL &&
                    DRIVER(cuCtxRecordEvent)(known->context, known->event) == CUDA_SUCCESS;
    known->waiting |= recorded; /* here and below: what waited before goes on waiting */
    for (unsigned i = 0; i < streams->streams.count && !recorded; i++) {
        struct known_stream *stream = streams_stream(streams, i);
        if (stream->context == known->context && stream->pending && event_of(&stream->event, known->context) != NULL &&
            streams_record(stream, stream->event))
            stream->waiting = true;
    }
    DRIVER(cuCtxPopCurrent_v2)(&popped);
}

void drain_begin(struct streams *streams) {
    CUstreamCaptureMode mode = streams_hide();
    lock(&streams->lock);
    for (unsigned i = 0; i < streams->contexts.count; i++) {
        struct known_context *known = streams_context(streams, i);
        if (known->context == NULL || !known->pending)
            continue;
        known->skipped = known->ending;
        if (!known->ending)
            begin_context(streams, known);
    }
    unlock(&streams->lock);
    streams_unhide(mode);
}

/* An error of the context or the device ends its work too; any other answer says nothing about the work, which then
 * counts as unfinished. */
bool drain_finished(CUevent event, CUcontext context) {
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

/* Of a context that is ending, the thread that ends it says when that is done. */
static bool context_finished(struct streams *streams, struct known_context *known) {
    if (known->context == NULL)
        return true;
    if (known->ending)
        return !known->pending;
    if (known->skipped) { /* it goes on after all */
        known->skipped = false;
        begin_context(streams, known);
    }
    if (known->waiting)
        known->waiting = !drain_finished(known->event, known->context);
    return !known->waiting;
}

static bool stream_finished(const struct streams *streams, struct known_stream *known) {
    if (known->context == NULL || !known->waiting)
        return true;
    if (streams_ending(streams, known->context))
        return true; /* as its context says */
    known->waiting = !drain_finished(known->event, known->context);
    if (known->waiting)
        return false;
    if (known->stream == STREAM_ORPHAN) {
        DRIVER(cuEventDestroy_v2)(known->event);
        *known = (struct known_stream){0};
    }
    return true;
}

bool drain_poll(struct streams *streams) {
    bool all = true;
    CUstreamCaptureMode mode = streams_hide();
    lock(&streams->lock);
    for (unsigned i = 0; i < streams->contexts.count && all; i++)
        all = context_finished(streams, streams_context(streams, i));
    for (unsigned i = 0; i < streams->streams.count && all; i++)
        all = stream_finished(streams, streams_stream(streams, i));
    unlock(&streams->lock);
    streams_unhide(mode);
    return all;
}

void drain_end(struct streams *streams) {
    lock(&streams->lock);
    for (unsigned i = 0; i < streams->contexts.count; i++)
        streams_context(streams, i)->pending = false;
    for (unsigned i = 0; i < streams->streams.count; i++)
        streams_stream(streams, i)->pending = false;
    unlock(&streams->lock);
}
