/* For each registered stream, the drain waits for the last fence of each thread that launched into the stream, if that
 * fence is behind all launches of the thread. Otherwise it queries the stream, until the thread records such a fence
 * before other work. The drain records no event for these launches: the driver's queue may be full, and the call would
 * then wait for room while it holds the registry's lock. For launches of threads without a queue the drain records an
 * event behind all work of the context, or queries the stream. A capturing stream runs nothing, and its earlier work
 * was fenced when the capture began (R5, streams.h). cuCtxSynchronize cannot be used, because it would invalidate
 * captures and cannot be polled.
 *
 * An event in the legacy stream is a barrier between all blocking streams of the context. So the hook records an event
 * there only directly behind a launch, or directly before work, of the program in that stream (D4). Only its own thread
 * can query a per-thread default stream. A thread that waits at the gate has recorded a fence behind its launches into
 * that stream. Until then the drain waits for all work of the context, or until the thread arrives at the gate.
 *
 * Only G1 ensures that no launch follows the events. A launch may have slept in a full queue of the driver when the
 * events were recorded. token.c finds such a launch by gate_finished, and begins the drain again.
 */
#include "time/drain.h"

#include "time/waits.h"

#define NOT_COVERED UINT64_MAX /* number of launches that is never reached */

/* Return whether launches into a per-thread default stream of the row have no fence of their thread behind them. */
static bool per_thread_uncovered(const struct known_stream *row) {
    for (const struct queue *queue = row->queues; queue != NULL; queue = queue->stream_next)
        if (queue->stream == CU_STREAM_PER_THREAD && atomic_load(&queue->fenced) != atomic_load(&queue->launched))
            return true;
    return false;
}

/* Record the event of the row behind all work of its context, because its own stream may be full. Return false if that
 * needs cuCtxRecordEvent of a later driver, or if a capture is open. Return false also for a stream that does not wait
 * for the program, while another stream of the context does. The drain then queries the stream. Exception: an event in
 * the legacy stream orders the program's streams (D4), but if the driver has no cuCtxRecordEvent, only this event shows
 * the end of launches of threads without a queue. */
static bool record_behind(struct streams *streams, const struct known_stream *row) {
    bool behind_all = row->stream == NULL || row->held || !waits_left(streams, row->context, NULL);
    if (behind_all && streams_record_context(streams, row, row->event))
        return true;
    return row->stream == NULL && !row->held && !HAS(cuCtxRecordEvent) && row->unmetered &&
           streams_record(streams, row, row->event);
}

/* Make sure that the row has an event. Return false if the driver refuses. */
static bool has_event(struct known_stream *row) {
    if (row->event == NULL)
        row->event = event_make(row->context->context, CU_EVENT_DISABLE_TIMING);
    return row->event != NULL;
}

/* Record the event of the row behind the work of its stream, whose context exists, and mark the launches of all queues
 * as covered. The row still waits for earlier work. A launch that is counted after this call is not covered. Return
 * false if the event cannot be recorded now. The caller holds the lock. */
static bool cover(struct streams *streams, struct known_stream *row) {
    if (!has_event(row))
        return false;
    for (struct queue *queue = row->queues; queue != NULL; queue = queue->stream_next)
        queue->covered = atomic_load(&queue->launched);
    bool recorded = record_behind(streams, row);
    row->waiting |= recorded;
    for (struct queue *queue = row->queues; queue != NULL && !recorded; queue = queue->stream_next)
        queue->covered = NOT_COVERED;
    return recorded;
}

/* Return whether a thread is inside a launch that may go into the stream. That launch may sleep in a full queue of the
 * driver. A call of the hook would then sleep too, and the event would be before the launch. */
static bool launched_into(const struct known_stream *row) {
    for (const struct queue *queue = row->queues; queue != NULL; queue = queue->stream_next)
        if (atomic_load(&queue->slot->sequence) & 1)
            return true;
    return false;
}

/* Record the event of the row in its stream, in a thread whose next call waits for that stream. The stream may be full:
 * this call then waits for room, as the next one would. No other thread must wait for it, so the lock is released
 * during the call. Only one thread at a time does this for a row. The caller holds the lock. */
static void cover_in_stream(struct streams *streams, struct known_stream *row) {
    struct known_context *known = row->context;
    CUcontext context = known->context;
    CUstream stream = row->stream;
    CUevent event = row->event;
    uint32_t epoch = known->epoch;
    for (struct queue *queue = row->queues; queue != NULL; queue = queue->stream_next)
        queue->covering = atomic_load(&queue->launched);
    row->covering = true;
    unlock(&streams->lock);
    CUstreamCaptureMode mode = own_record_begin();
    bool recorded = event_record(context, event, stream) == CUDA_SUCCESS;
    own_calls_end(mode);
    lock(&streams->lock);
    row = streams_lives(streams, context, epoch) ? streams_find(streams, streams_find_context(streams, context), stream)
                                                 : NULL;
    if (row == NULL || !row->covering) /* the stream has ended */
        return;
    row->covering = false;
    row->waiting |= recorded;
    for (struct queue *queue = row->queues; queue != NULL && recorded; queue = queue->stream_next)
        if (queue->covered == NOT_COVERED || queue->covered < queue->covering)
            queue->covered = queue->covering;
}

/* Return whether the launches of the row need an event before ungated work. They need none if a capture forbids it (R3,
 * streams.h), or if recording might wait for room behind a wait of the program. `row` may be NULL. The caller holds the
 * lock. */
static bool needs_cover(const struct streams *streams, const struct known_stream *row) {
    return row != NULL && !context_unsettled(row->context) && !row->covering && !streams_covered(row) &&
           !launched_into(row) && row->waits == NULL && !streams_may_block(streams, row);
}

/* Record the event of the row, if its launches need one. Return whether the lock was released. The caller holds the
 * lock. */
static bool cover_before_ungated(struct streams *streams, struct known_stream *row) {
    if (!needs_cover(streams, row))
        return false;
    CUstreamCaptureMode mode = own_calls_begin();
    bool in_stream = row->stream != NULL && !row->held && has_event(row) && streams_may_record(streams, row);
    if (!in_stream)
        cover(streams, row);
    own_calls_end(mode);
    if (in_stream)
        cover_in_stream(streams, row);
    return in_stream;
}

void drain_before_ungated(struct streams *streams, CUstream named, CUcontext current) {
    lock(&streams->lock);
    for (struct known_context *known = streams->contexts; known != NULL; known = known->next) {
        struct known_stream *row = stream_is_default(named) ? NULL : streams_find(streams, known, named);
        if (named == CU_STREAM_LEGACY && (current == NULL || known->context == current))
            cover_before_ungated(streams, streams_find(streams, known, NULL));
        if (cover_before_ungated(streams, row))
            break; /* the list may have changed, and only one context has the stream */
    }
    unlock(&streams->lock);
    if (named == CU_STREAM_LEGACY) /* all streams without CU_STREAM_NON_BLOCKING wait for the legacy stream */
        drain_before_ungated_context(streams, current, false);
}

void drain_before_ungated_context(struct streams *streams, CUcontext context, bool all) {
    bool released = true;
    lock(&streams->lock);
    for (uint32_t round = ++streams->rounds; released;) {
        released = false;
        for (struct known_stream *row = streams->busy; row != NULL && !released; row = row->busy_next)
            if ((int32_t)(row->round - round) < 0 && (context == NULL || row->context->context == context)) {
                row->round = round;
                released = (all || streams_blocking(row)) && cover_before_ungated(streams, row);
            }
    }
    unlock(&streams->lock);
}

/* Make the drain wait for the last fence of each thread. The caller holds the lock. */
static void await_fences(struct known_stream *row) {
    for (struct queue *queue = row->queues; queue != NULL; queue = queue->stream_next)
        queue->awaited = atomic_load(&queue->last) != NULL;
}

/* Make the drain wait for one stream, whose context exists. The caller holds the lock. */
static void begin_stream(struct streams *streams, struct known_stream *row) {
    if (row->stream == STREAM_ORPHAN) { /* its stream was destroyed next to an open capture */
        row->waiting = streams_record_context(streams, row, row->event);
        row->unseen = !row->waiting;
        row->number = streams->noted;
        return;
    }
    bool by_event = row->unmetered || (row->stream == NULL && per_thread_uncovered(row));
    bool recorded = by_event && cover(streams, row);
    row->unseen = by_event && !recorded && row->stream == NULL && streams->captures.count > 0;
    bool by_query = row->held || row->stream != NULL;
    row->asked = by_event ? !recorded && !row->unseen && by_query : !streams_covered(row);
    await_fences(row); /* also for a row that is queried: its per-thread default streams have fences */
}

void drain_begin(struct streams *streams) {
    CUstreamCaptureMode mode = own_calls_begin();
    lock(&streams->lock);
    for (struct known_stream *row = streams->busy; row != NULL; row = row->busy_next) {
        row->skipped = row->pending && context_unsettled(row->context);
        if (row->pending && !row->skipped)
            begin_stream(streams, row);
    }
    unlock(&streams->lock);
    own_calls_end(mode);
}

/* Return whether the row's stream has unfinished work. If a capture forbids the query, return whether the row is
 * `blind`. The work of other rows is before an event (R5, streams.h), which the caller checks. */
static bool unfinished(struct streams *streams, struct known_stream *row) {
    CUcontext popped;
    if (DRIVER(cuCtxPushCurrent_v2)(row->context->context) != CUDA_SUCCESS)
        return false; /* the context no longer exists */
    CUresult result = streams_query(streams, row, row->stream != NULL ? row->stream : CU_STREAM_LEGACY);
    DRIVER(cuCtxPopCurrent_v2)(&popped);
    if (result == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        return row->blind;
    if (result == CUDA_SUCCESS && atomic_load(&streams->holding) == 0)
        streams_note_idle(streams, row);
    return !work_over(result);
}

/* For a row of default streams, wait for the threads' fences instead of all work of the context, as soon as each thread
 * has recorded a fence behind its own launches. Other work of the context may wait for launches that the gate holds
 * back. */
static void prefer_fences(struct known_stream *row) {
    if (row->stream != NULL || row->unmetered || !(row->waiting || row->unseen) || per_thread_uncovered(row))
        return;
    row->waiting = row->unseen = false;
    for (struct queue *queue = row->queues; queue != NULL; queue = queue->stream_next) {
        queue->covered = NOT_COVERED; /* the drain no longer waits for the event of the row */
        row->asked |= atomic_load(&queue->fenced) != atomic_load(&queue->launched);
    }
    await_fences(row);
}

/* Return whether the work of the row is over. Return false while its context is ending: the thread that ends the
 * context removes the row. */
static bool finished(struct streams *streams, struct known_stream *row) {
    CUcontext context = row->context->context;
    if (context_unsettled(row->context))
        return false;
    if (row->skipped) { /* the end is over: the context still exists, or the row belongs to another context */
        row->skipped = false;
        begin_stream(streams, row);
    }
    struct program_wait *wait = row->unmetered ? NULL : streams_oldest_wait(streams, row);
    if (wait != NULL && streams_crossed(row, wait))
        wait = NULL;
    if (wait != NULL && (wait->fences || wait->unseen))
        return waits_reached(row, wait);
    if (wait != NULL && row->stream == STREAM_ORPHAN)
        return true;
    prefer_fences(row);
    if (row->unseen) /* a capture may have ended */
        begin_stream(streams, row);
    if (row->waiting)
        row->waiting = !event_passed(row->event, context);
    if (row->asked && !row->unmetered &&
        streams_covered(row)) { /* all launches were covered after the drain began, before ungated work (Q4) */
        row->asked = false;
        await_fences(row);
    }
    if (row->asked && wait == NULL)
        row->asked = unfinished(streams, row);
    bool awaited = row->waiting || (row->asked && wait == NULL) || row->unseen, fences = false;
    for (struct queue *queue = row->queues; queue != NULL && !awaited; queue = queue->stream_next) {
        fences |= queue->awaited;
        if (queue->awaited)
            queue->awaited = !event_passed(atomic_load(&queue->last), context);
        awaited = queue->awaited;
    }
    if (!awaited && fences && row->held && wait == NULL)
        unfinished(streams, row); /* the query also finds out whether the waits of the program are over */
    return !awaited;
}

bool drain_poll(struct streams *streams) {
    bool all = true;
    CUstreamCaptureMode mode = own_calls_begin();
    lock(&streams->lock);
    for (struct known_stream *row = streams->busy; row != NULL && all; row = row->busy_next)
        all = finished(streams, row);
    for (struct known_stream *next, *row = streams->orphans; row != NULL && all; row = next) {
        next = row->busy_next;
        bool over = finished(streams, row);
        if (over && row->waits == NULL)
            streams_forget(streams, row, true);
        all = over || (row->left && waits_left(streams, row->context, row));
    }
    unlock(&streams->lock);
    own_calls_end(mode);
    return all;
}

enum drain_left drain_left(struct streams *streams) {
    enum drain_left left = DRAIN_LEFT_NOTHING;
    CUstreamCaptureMode mode = own_calls_begin();
    lock(&streams->lock);
    for (struct known_stream *row = streams->busy; row != NULL && left != DRAIN_LEFT_RUNS; row = row->busy_next) {
        if (!row->left || row->unmetered || context_unsettled(row->context))
            continue;
        row->asked = !streams_covered(row);
        await_fences(row);
        row->left = !finished(streams, row) || row->waits != NULL;
        if (row->left)
            left = row->waits == NULL ? DRAIN_LEFT_RUNS : DRAIN_LEFT_WAITS;
    }
    unlock(&streams->lock);
    own_calls_end(mode);
    return left;
}

bool drain_over(struct streams *streams, const struct queue *queue) {
    CUstreamCaptureMode mode = own_calls_begin();
    lock(&streams->lock);
    bool over = atomic_load(&queue->ended);
    if (!over &&
        queue->stream == CU_STREAM_PER_THREAD) /* the row also stands for the per-thread streams of other threads */
        over = !context_unsettled(queue->row->context) &&
               atomic_load(&queue->fenced) == atomic_load(&queue->launched) &&
               event_passed(atomic_load(&queue->last), queue->context);
    else if (!over)
        over = finished(streams, queue->row);
    unlock(&streams->lock);
    own_calls_end(mode);
    return over;
}

/* Return whether launches may be behind the oldest wait of the row. */
static bool launched_behind_wait(const struct known_stream *row) {
    return row->waits != NULL && (row->waits != row->last_wait || streams_launched(row) != row->launched_before);
}

void drain_end(struct streams *streams, bool cleared) {
    lock(&streams->lock);
    for (struct known_stream *next, *row = streams->busy; row != NULL; row = next) {
        next = row->busy_next;
        row->left = row->pending && launched_behind_wait(row);
        row->pending &= !cleared || row->left;
        if (!row->pending)
            row->idle_after = streams_launched(row);
        row->unmetered &= !cleared;
        row->unseen = false;
        streams_set_busy(streams, row, row->waiting || row->asked || row->pending);
    }
    unlock(&streams->lock);
}
