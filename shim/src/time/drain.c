/* One event behind a whole context where the driver has cuCtxRecordEvent (CUDA 12.5) and nothing is being captured,
 * else one behind each registered stream that does not capture. A capturing stream runs nothing, and what it ran before
 * was fenced when the capture began (R5). cuCtxSynchronize would invalidate captures, and cannot be polled.
 *
 * Only after G1 is it sure that no launch comes behind the events; token.c looks at gate_launches for one that slept in
 * a full queue of the driver, and begins again.
 */
#include "time/drain.h"

/* Return the event, made if need be; NULL: the driver makes none. */
static CUevent event_of(CUevent *event, CUcontext context) {
    if (*event == NULL)
        *event = event_make(context, CU_EVENT_DISABLE_TIMING);
    return *event;
}

/* Record behind the work of one context. With the lock. */
static void begin_context(struct streams *streams, struct known_context *known) {
    CUcontext popped;
    if (DRIVER(cuCtxPushCurrent_v2)(known->context) != CUDA_SUCCESS)
        return;
    bool recorded = HAS(cuCtxRecordEvent) && streams->captures.count == 0 &&
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
    CUstreamCaptureMode mode = own_calls_begin();
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
    own_calls_end(mode);
}

/* Return whether the work of a context is over. If the context is ending, the thread that ends it says so. */
static bool context_finished(struct streams *streams, struct known_context *known) {
    if (known->context == NULL)
        return true;
    if (known->ending)
        return !known->pending;
    if (known->skipped) { /* the program could not end it: it goes on */
        known->skipped = false;
        begin_context(streams, known);
    }
    if (known->waiting)
        known->waiting = !event_passed(known->event, known->context);
    return !known->waiting;
}

/* Return whether the work before the event of a stream is over. */
static bool stream_finished(const struct streams *streams, struct known_stream *known) {
    if (known->context == NULL || !known->waiting)
        return true;
    if (streams_ending(streams, known->context))
        return true; /* as its context says */
    known->waiting = !event_passed(known->event, known->context);
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
    CUstreamCaptureMode mode = own_calls_begin();
    lock(&streams->lock);
    for (unsigned i = 0; i < streams->contexts.count && all; i++)
        all = context_finished(streams, streams_context(streams, i));
    for (unsigned i = 0; i < streams->streams.count && all; i++)
        all = stream_finished(streams, streams_stream(streams, i));
    unlock(&streams->lock);
    own_calls_end(mode);
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
