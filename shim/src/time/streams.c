/* The registry's tables. The lock is held for a few driver calls that neither wait nor call back (R4); the wrappers of
 * what ends a stream or a context are in wrappers/work/destroy.c.
 */
#include "time/streams.h"

enum { SWEEP = 8 }; /* rows looked at with each fence: keeps their number bounded without a drain */

struct known_context *streams_find_context(struct streams *streams, CUcontext context) {
    for (unsigned i = 0; i < streams->contexts.count; i++) {
        struct known_context *known = streams_context(streams, i);
        if (context != NULL && known->context == context && !known->ending)
            return known;
    }
    return NULL;
}

bool streams_ending(const struct streams *streams, CUcontext context) {
    for (unsigned i = 0; i < streams->contexts.count; i++)
        if (streams_context(streams, i)->context == context && streams_context(streams, i)->ending)
            return true;
    return false;
}

struct known_context *streams_note_context(struct streams *streams, CUcontext context) {
    struct known_context *place = streams_find_context(streams, context);
    if (place != NULL)
        return place;
    for (unsigned i = 0; i < streams->contexts.count && place == NULL; i++)
        if (streams_context(streams, i)->context == NULL)
            place = streams_context(streams, i);
    if (place == NULL && rows_room(&streams->contexts, sizeof *place))
        place = streams_context(streams, streams->contexts.count++);
    if (place != NULL)
        *place = (struct known_context){.context = context, .epoch = ++streams->epochs};
    return place;
}

/* Return a free row of `streams`, or `count`: no memory. With the lock. */
static unsigned free_row(struct streams *streams) {
    for (unsigned i = 0; i < streams->streams.count; i++)
        if (streams_stream(streams, i)->context == NULL)
            return i;
    if (rows_room(&streams->streams, sizeof(struct known_stream)))
        *streams_stream(streams, streams->streams.count++) = (struct known_stream){0};
    else
        return streams->streams.count;
    return streams->streams.count - 1;
}

/* Return the row of a stream, made if need be; NULL: no memory. With the lock. */
static struct known_stream *note_stream(struct streams *streams, CUcontext context, CUstream stream) {
    uint32_t *hint =
        &streams->hints[((uintptr_t)stream >> 4 ^ (uintptr_t)stream >> 14 ^ (uintptr_t)context >> 4) % STREAMS_HINTS];
    if (*hint < streams->streams.count) {
        struct known_stream *known = streams_stream(streams, *hint);
        if (known->context == context && known->stream == stream)
            return known;
    }
    for (unsigned i = 0; i < streams->streams.count; i++) {
        struct known_stream *known = streams_stream(streams, i);
        if (known->context == context && known->stream == stream) {
            *hint = i;
            return known;
        }
    }
    unsigned row = free_row(streams);
    if (row == streams->streams.count)
        return NULL;
    *streams_stream(streams, row) = (struct known_stream){.context = context, .stream = stream};
    *hint = row;
    return streams_stream(streams, row);
}

/* Free some rows whose fences are over: without a drain nobody else would. With the lock. */
static void sweep(struct streams *streams) {
    for (int i = 0; i < SWEEP && streams->streams.count > 0; i++) {
        streams->swept = (streams->swept + 1) % streams->streams.count;
        struct known_stream *known = streams_stream(streams, streams->swept);
        if (known->context == NULL || known->stream != STREAM_ORPHAN || streams_ending(streams, known->context) ||
            !event_passed(known->event, known->context))
            continue;
        DRIVER(cuEventDestroy_v2)(known->event);
        *known = (struct known_stream){0};
    }
}

bool streams_record(const struct known_stream *known, CUevent event) {
    CUstream stream = known->stream ? known->stream : CU_STREAM_LEGACY;
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (HAS(cuStreamIsCapturing) &&
        (DRIVER(cuStreamIsCapturing)(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE))
        return false; /* the legacy stream cannot be touched while a stream that waits for it captures */
    return DRIVER(cuEventRecord)(event, stream) == CUDA_SUCCESS;
}

void streams_fence(struct streams *streams, unsigned index) {
    struct known_stream known = *streams_stream(streams, index), fence = {.stream = STREAM_ORPHAN, .waiting = true};
    CUcontext popped;
    if (streams_ending(streams, known.context))
        return;
    CUstreamCaptureMode mode = own_calls_begin();
    sweep(streams);
    unsigned row = free_row(streams);
    fence.context = known.context;
    fence.event = row < streams->streams.count ? event_make(known.context, CU_EVENT_DISABLE_TIMING) : NULL;
    if (fence.event != NULL && DRIVER(cuCtxPushCurrent_v2)(known.context) == CUDA_SUCCESS) {
        if (streams_record(&known, fence.event))
            *streams_stream(streams, row) = fence;
        else
            DRIVER(cuEventDestroy_v2)(fence.event);
        DRIVER(cuCtxPopCurrent_v2)(&popped);
    }
    own_calls_end(mode);
}

void streams_forget_capture(struct streams *streams, struct gate *gate, unsigned index) {
    unsigned last = streams->captures.count - 1;
    *streams_capture(streams, index) = *streams_capture(streams, last);
    streams->captures.count = last;
    gate_set_captures(gate, last);
}

void streams_destroy_events(struct streams *streams, CUcontext context, uint32_t epoch, CUevent *events, int count) {
    lock(&streams->lock);
    struct known_context *known = streams_find_context(streams, context);
    bool alive = known != NULL && known->epoch == epoch;
    for (int i = 0; i < count; i++) {
        if (events[i] != NULL && alive)
            DRIVER(cuEventDestroy_v2)(events[i]);
        events[i] = NULL;
    }
    unlock(&streams->lock);
}

bool streams_register(struct streams *streams, struct gate *gate, CUstream stream, uint32_t word,
                      struct slot_stream *entry) {
    CUcontext context = context_of_stream(stream);
    if (context == NULL) { /* the driver will refuse it; what is remembered here is another stream */
        entry->registered.gate_word = 0;
        entry->registered.metered = false;
        return true;
    }
    if (entry->registered.gate_word == word && entry->registered.stream == stream &&
        entry->registered.context == context)
        return true;
    lock(&streams->lock);
    struct known_context *known = streams_note_context(streams, context);
    struct known_stream *known_stream =
        known != NULL ? note_stream(streams, context, stream_is_default(stream) ? NULL : stream) : NULL;
    uint32_t epoch = known != NULL ? known->epoch : 0;
    if (streams->epochs > 1)
        atomic_store(&gate->contexts, CONTEXTS_SEVERAL);
    if (known_stream != NULL)
        known->pending = known_stream->pending = true;
    unlock(&streams->lock);
    if (known_stream == NULL)
        return false;
    if (entry->registered.context != context || entry->registered.context_epoch != epoch) {
        streams_destroy_events(streams, entry->registered.context, entry->registered.context_epoch,
                               entry->window.events, FENCES);
        entry->window.count = entry->window.fences = 0;
        entry->window.skipped = entry->window.quantum_full = entry->window.blocked_at_close = false;
    } /* else they go on bounding the queue, whatever stream they were recorded on */
    if (entry->registered.stream != stream)
        entry->estimate.launch_ns = 0; /* learned of another stream */
    if (entry->window.size == 0)
        entry->window.size = entry->window.quota = 1;
    entry->registered.stream = stream;
    entry->registered.context = context;
    entry->registered.context_epoch = epoch;
    entry->registered.metered = (word & GATE_METERED) != 0;
    entry->registered.gate_word =
        word & GATE_CAPTURING ? 0 : word; /* while a capture is open each launch asks whether it is recorded */
    return true;
}
