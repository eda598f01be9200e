/* Of each registered stream the drain waits for the last fences of the threads that launched into it, if these are
 * behind all of their launches (meter.c sees to that before other work is put behind them), else for an event that it
 * records itself. A capturing stream runs nothing, and what it ran before was fenced when the capture began (R5).
 * cuCtxSynchronize would invalidate captures, and cannot be polled; cuCtxRecordEvent would wait for all of the context.
 *
 * Only after G1 is it sure that no launch comes behind the events; token.c looks at gate_finished for one that slept in
 * a full queue of the driver, and begins again.
 */
#include "time/drain.h"

/* Return whether the fences of the threads are behind all that went into the stream. */
static bool fenced(const struct known_stream *row) {
    for (const struct queue *queue = row->queues; queue != NULL; queue = queue->stream_next)
        if (atomic_load(&queue->fenced) != atomic_load(&queue->launched))
            return false;
    return !row->unmetered;
}

/* Record behind the work of one stream, whose context lives. What waited before goes on waiting. With the lock. */
static void begin_stream(struct known_stream *row) {
    CUcontext context = row->context->context, popped;
    if (fenced(row)) {
        for (struct queue *queue = row->queues; queue != NULL; queue = queue->stream_next)
            queue->awaited = atomic_load(&queue->last) != NULL;
        return;
    }
    if (row->event == NULL)
        row->event = event_make(context, CU_EVENT_DISABLE_TIMING);
    if (row->event == NULL || DRIVER(cuCtxPushCurrent_v2)(context) != CUDA_SUCCESS)
        return;
    if (streams_record(row, row->event))
        row->waiting = true;
    DRIVER(cuCtxPopCurrent_v2)(&popped);
}

void drain_begin(struct streams *streams) {
    CUstreamCaptureMode mode = own_calls_begin();
    lock(&streams->lock);
    for (struct known_stream *row = streams->busy; row != NULL; row = row->busy_next) {
        row->skipped = row->pending && row->context->ending;
        if (row->pending && !row->skipped)
            begin_stream(row);
    }
    unlock(&streams->lock);
    own_calls_end(mode);
}

/* Return whether the work of the row is over. If its context is ending, the thread that ends it says so. */
static bool finished(struct known_stream *row) {
    CUcontext context = row->context->context;
    if (row->context->ending)
        return false;
    if (row->skipped) { /* the program could not end the context: it goes on */
        row->skipped = false;
        begin_stream(row);
    }
    if (row->waiting)
        row->waiting = !event_passed(row->event, context);
    bool awaited = row->waiting;
    for (struct queue *queue = row->queues; queue != NULL && !awaited; queue = queue->stream_next) {
        if (queue->awaited)
            queue->awaited = !event_passed(atomic_load(&queue->last), context);
        awaited = queue->awaited;
    }
    return !awaited;
}

bool drain_poll(struct streams *streams) {
    bool all = true;
    CUstreamCaptureMode mode = own_calls_begin();
    lock(&streams->lock);
    for (struct known_stream *row = streams->busy; row != NULL && all; row = row->busy_next)
        all = finished(row);
    for (struct known_stream *next, *row = streams->orphans; row != NULL && all; row = next) {
        next = row->busy_next;
        all = finished(row);
        if (all)
            streams_forget(streams, row, true);
    }
    unlock(&streams->lock);
    own_calls_end(mode);
    return all;
}

bool drain_over(struct streams *streams, const struct queue *queue) {
    CUstreamCaptureMode mode = own_calls_begin();
    lock(&streams->lock);
    bool over = atomic_load(&queue->ended) || finished(queue->row);
    unlock(&streams->lock);
    own_calls_end(mode);
    return over;
}

void drain_end(struct streams *streams, bool cleared) {
    lock(&streams->lock);
    for (struct known_stream *next, *row = streams->busy; row != NULL; row = next) {
        next = row->busy_next;
        row->pending &= !cleared;
        row->unmetered &= !cleared;
        streams_set_busy(streams, row, row->waiting || row->pending);
    }
    unlock(&streams->lock);
}
