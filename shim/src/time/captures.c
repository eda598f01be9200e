/* A row with STREAM_ORPHAN shows, by its event, the end of work whose stream the hook cannot query any more: a capture
 * forbids the query, or the program has destroyed the stream. */
#include "time/captures.h"

#include "time/waits.h"

/* Launches after which a stream may be full: it has room for 1,024 operations, and others may follow each launch. */
enum { FULL_FROM = 256 };
enum { SWEEP = 8 }; /* rows with STREAM_ORPHAN that captures_fence checks and perhaps frees, to limit their number */

/* Free some rows whose events have passed. Between drains no other code frees such rows. The caller holds the lock. */
static void sweep(struct streams *streams) {
    struct known_stream *next, *orphan = streams->orphans;
    for (int i = 0; i < SWEEP && orphan != NULL; i++, orphan = next) {
        next = orphan->busy_next;
        if (!orphan->context->ending && !orphan->unseen && event_passed(orphan->event, orphan->context->context))
            streams_forget(streams, orphan, true);
    }
}

/* Return whether the work before the row's oldest wait has finished. */
static bool reaches_wait(const struct known_stream *row) {
    const struct program_wait *wait = row->waits;
    if (wait->fences || (wait->call != NULL && atomic_load(&wait->call->begun)))
        return waits_reached(row, wait);
    bool over = !wait->unseen && !row->unmetered && !row->waiting;
    for (const struct queue *queue = row->queues; queue != NULL && over; queue = queue->stream_next)
        over = atomic_load(&queue->last) == NULL || event_passed(atomic_load(&queue->last), row->context->context);
    return over;
}

/* Give the waits of a row that is about to be removed to another row. */
static void move_waits(struct known_stream *from, struct known_stream *to) {
    for (struct program_wait *wait = from->waits; wait != NULL; wait = wait->next)
        wait->crossed = streams_crossed(from, wait);
    to->waits = from->waits;
    to->last_wait = from->last_wait;
    to->places = from->places;
    to->left = true;
    from->waits = from->last_wait = from->unmarked = NULL;
    from->places = 0;
}

/* Return whether so much was launched into the stream since it was last seen idle that it may be full. */
static bool may_be_full(const struct known_stream *row) {
    return streams_launched(row) - row->idle_after >= FULL_FROM;
}

/* Record the event behind the row's unfinished work. Record it behind all work of the context if the stream may be
 * full, or if no other stream waits for the program. `few`: the context has room for such an event. Return false if no
 * event could be recorded. */
static bool record_behind(struct streams *streams, struct known_stream *row, CUevent event, bool waits, bool few) {
    bool may_block = waits || (row->held && row->context->held);
    bool behind_all =
        may_block || row->stream == NULL || (few && (may_be_full(row) || !waits_left(streams, row->context, NULL)));
    return (behind_all && streams_record_context(streams, row, event)) ||
           (!may_block && streams_record(streams, row, event));
}

void captures_fence(struct streams *streams, struct known_stream *row, bool leaves) {
    struct known_context *context = row->context;
    CUcontext popped;
    if (context_unsettled(context))
        return;
    CUstreamCaptureMode mode = own_calls_begin();
    bool waits = streams_oldest_wait(streams, row) != NULL;
    sweep(streams);
    bool few = context->orphans < ORPHANS_MOST;
    row->blind = streams_may_block(streams, row) || (waits && !leaves);
    bool later = row->blind && leaves && HAS(cuCtxRecordEvent); /* a drain records the event after the captures */
    if ((row->blind && !later) || ((waits || later) && !few)) {
        own_calls_end(mode);
        return;
    }
    struct known_stream *fence = streams_add_row(streams, context, STREAM_ORPHAN);
    CUevent event = fence != NULL ? event_make(context->context, CU_EVENT_DISABLE_TIMING) : NULL;
    bool recorded = false;
    if (event != NULL && DRIVER(cuCtxPushCurrent_v2)(context->context) == CUDA_SUCCESS) {
        bool over = leaves && streams_idle(streams, row);
        recorded = !over && !later && record_behind(streams, row, event, waits, few);
        fence->unseen = !over && later;
        DRIVER(cuCtxPopCurrent_v2)(&popped);
    }
    if (fence != NULL) {
        fence->event = event;
        fence->number = streams->noted;
        fence->waiting = recorded;
        streams_set_busy(streams, fence, true);
        if ((recorded || fence->unseen) && waits && reaches_wait(row))
            move_waits(row, fence);
        if (!recorded && !fence->unseen)
            streams_forget(streams, fence, true);
    }
    own_calls_end(mode);
}

/* Record an event behind the unfinished work of the legacy stream, because the legacy stream cannot be queried while
 * the capture is open (R5). */
static void fence_legacy(struct streams *streams, CUcontext context) {
    const struct known_context *known = streams_find_context(streams, context);
    struct known_stream *row = known != NULL ? streams_find(streams, known, NULL) : NULL;
    if (row != NULL && row->pending)
        captures_fence(streams, row, false);
}

bool captures_note(struct streams *streams, struct gate *gate, const struct open_capture *capture) {
    if (!rows_room(&streams->captures, sizeof *capture))
        return false;
    unsigned flags = CU_STREAM_DEFAULT;
    struct open_capture *noted = streams_capture(streams, streams->captures.count);
    *noted = *capture;
    noted->blocks =
        capture->stream != CU_STREAM_LEGACY &&
        (capture->stream == CU_STREAM_PER_THREAD || !HAS(cuStreamGetFlags) ||
         DRIVER(cuStreamGetFlags)(capture->stream, &flags) != CUDA_SUCCESS || !(flags & CU_STREAM_NON_BLOCKING));
    if (noted->blocks)
        fence_legacy(streams, capture->context);
    gate_set_captures(gate, ++streams->captures.count);
    return true;
}

/* A default stream needs no event here. Only a per-thread default stream may join a capture, and its thread has already
 * recorded a fence behind its launches. An event in the legacy stream would order streams that the program has not
 * ordered (D4, drain.h). */
bool captures_join(struct streams *streams, struct gate *gate, CUstream stream) {
    struct open_capture joins = {.context = context_of_stream(stream), .stream = stream, .joins = true};
    lock(&streams->lock);
    for (struct known_context *known = streams->contexts; known != NULL; known = known->next) {
        struct known_stream *row = stream_is_default(stream) ? NULL : streams_find(streams, known, stream);
        if (row != NULL && row->pending)
            captures_fence(streams, row, false);
    }
    bool noted = captures_note(streams, gate, &joins);
    unlock(&streams->lock);
    return noted;
}

void captures_joined(struct streams *streams, struct gate *gate, CUstream stream) {
    lock(&streams->lock);
    for (unsigned i = streams->captures.count; i > 0; i--) {
        const struct open_capture *capture = streams_capture(streams, i - 1);
        if (capture->joins && capture->stream == stream) {
            captures_forget(streams, gate, i - 1);
            break;
        }
    }
    unlock(&streams->lock);
}

void captures_forget(struct streams *streams, struct gate *gate, unsigned index) {
    unsigned last = streams->captures.count - 1;
    *streams_capture(streams, index) = *streams_capture(streams, last);
    streams->captures.count = last;
    gate_set_captures(gate, last);
}
