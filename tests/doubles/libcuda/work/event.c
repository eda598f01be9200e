/* Events of the double. */
#include <stdlib.h>

#include "device/fake.h"
#include "memory/pool.h"

static int live_events;

/* Not a function of CUDA: returns the number of events that were created and not destroyed. */
EXPORT int fake_live_events(void);
EXPORT int fake_live_events(void) {
    return live_events;
}

EXPORT CUresult cuEventCreate(CUevent *out, unsigned int flags) {
    if (out == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    struct event *event = calloc(1, sizeof *event);
    *out = (CUevent)event;
    pthread_mutex_lock(&fake_lock);
    *event = (struct event){
        .magic = MAGIC_EVENT, .flags = flags, .context = context, .next = context->events, .from = &context->events};
    if (event->next != NULL)
        event->next->from = &event->next;
    context->events = event;
    live_events++;
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}

void fake_events_of_context_gone(struct context *context) {
    for (struct event *event = context->events; event != NULL; event = event->next) {
        event->magic = MAGIC_DEAD;
        live_events--;
    }
    context->events = NULL;
}

/* Return whether the handle is that of an existing event. */
static bool is_event(const struct event *event) {
    if (fake_is(event, MAGIC_DEAD))
        fake_misused();
    return fake_is(event, MAGIC_EVENT);
}

EXPORT CUresult cuEventDestroy_v2(CUevent handle) {
    struct event *event = (struct event *)handle;
    if (!is_event(event))
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&fake_lock);
    event->magic = 0;
    live_events--;
    *event->from = event->next;
    if (event->next != NULL)
        event->next->from = event->from;
    /* The struct is never freed, because operations may still point to it. */
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}

static void record(struct event *event, struct stream *stream) {
    event->capture = NULL;
    fake_submit(stream, (struct op){.kind = OP_EVENT, .event = event, .generation = ++event->recorded});
}

EXPORT CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
    struct event *event = (struct event *)handle;
    struct stream *stream;
    CUresult result = fake_enter_stream(stream_handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (!is_event(event) || event->context != stream->context)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&fake_lock);
    if (stream->capture != NULL) {
        result = stream->capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
        event->capture = stream->capture;
    } else {
        result = fake_order_call(stream);
        if (result == CUDA_SUCCESS)
            record(event, stream);
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned int flags) {
    (void)flags;
    return cuEventRecord(event, stream);
}

EXPORT CUresult cuCtxRecordEvent(CUcontext handle, CUevent event_handle) {
    struct context *context = (struct context *)handle, *current;
    struct event *event = (struct event *)event_handle;
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    if (context == NULL && (result = fake_enter(&current)) == CUDA_SUCCESS)
        context = current;
    if (result != CUDA_SUCCESS)
        return result;
    if (!fake_is(context, MAGIC_CONTEXT) || !context->alive)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!is_event(event) || event->context != context)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&fake_lock);
    result = fake_sync_call(context);
    if (result == CUDA_SUCCESS)
        record(event, &context->marks);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

/* cuEventQuery and cuEventSynchronize (`wait`). They require a current context; CUDA does not document whether the
 * driver does. */
static CUresult event_call(CUevent handle, bool wait) {
    struct event *event = (struct event *)handle;
    struct context *current;
    CUresult result = fake_enter(&current);
    if (result != CUDA_SUCCESS)
        return result;
    if (!is_event(event))
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&fake_lock);
    result = fake_unsafe_call();
    if (result == CUDA_SUCCESS && event->capture != NULL) {
        event->capture->invalid = true;
        result = CUDA_ERROR_CAPTURED_EVENT;
    }
    if (result == CUDA_SUCCESS && wait) {
        fake_wait_event(event);
        fake_pools_waited(event->context->device);
    } else if (result == CUDA_SUCCESS) {
        if (fake_event_done(event))
            fake_settle(event->context->device); /* return memory that was freed before the event */
        else
            result = CUDA_ERROR_NOT_READY;
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuEventQuery(CUevent event) {
    return event_call(event, false);
}

EXPORT CUresult cuEventSynchronize(CUevent event) {
    return event_call(event, true);
}

EXPORT CUresult cuEventElapsedTime(float *milliseconds, CUevent start_handle, CUevent end_handle) {
    struct event *start = (struct event *)start_handle, *end = (struct event *)end_handle;
    if (milliseconds == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (!is_event(start) || !is_event(end) || ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING))
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&fake_lock);
    CUresult result = start->recorded == 0 || end->recorded == 0       ? CUDA_ERROR_INVALID_HANDLE
                      : fake_event_done(start) && fake_event_done(end) ? CUDA_SUCCESS
                                                                       : CUDA_ERROR_NOT_READY;
    if (result == CUDA_SUCCESS)
        *milliseconds = (float)((double)((int64_t)end->end - (int64_t)start->end) / 1e6);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end) {
    return cuEventElapsedTime(milliseconds, start, end);
}

EXPORT CUresult cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned int flags) {
    struct event *event = (struct event *)event_handle;
    struct stream *stream;
    CUresult result = fake_enter_stream(handle, &stream);
    (void)flags;
    if (result != CUDA_SUCCESS)
        return result;
    if (!is_event(event))
        return CUDA_ERROR_INVALID_HANDLE;
    if (event->capture != NULL)
        fake_take_time("FAKE_CUDA_CAPTURE_MS");
    pthread_mutex_lock(&fake_lock);
    if (event->capture != NULL && event->capture->over)
        result = CUDA_ERROR_CAPTURED_EVENT;
    else if (event->capture != NULL && stream->capture == NULL)
        stream->capture = event->capture; /* the stream joins the capture sequence */
    else if (event->capture != stream->capture) {
        if (stream->capture != NULL)
            stream->capture->invalid = true;
        result = event->capture != NULL ? CUDA_ERROR_STREAM_CAPTURE_MERGE : CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    } else if (stream->capture == NULL) {
        result = fake_order_call(stream);
        if (result == CUDA_SUCCESS && event->recorded > 0)
            fake_submit(stream, (struct op){.kind = OP_WAIT, .event = event, .generation = event->recorded});
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

/* All present streams of the context wait. Streams that are created later do not wait.
 */
EXPORT CUresult cuCtxWaitEvent(CUcontext handle, CUevent event_handle) {
    struct context *context = (struct context *)handle;
    struct event *event = (struct event *)event_handle;
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    if (!fake_is(context, MAGIC_CONTEXT) || !context->alive)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!is_event(event))
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&fake_lock);
    result = event->capture != NULL ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : fake_sync_call(context);
    struct stream *lists[] = {context->per_thread, context->streams};
    struct op wait = {.kind = OP_WAIT, .event = event, .generation = event->recorded};
    if (result == CUDA_SUCCESS && event->recorded > 0)
        fake_submit(&context->legacy, wait);
    for (int i = 0; i < 2 && result == CUDA_SUCCESS && event->recorded > 0; i++)
        for (struct stream *at = lists[i]; at != NULL; at = at->next)
            fake_submit(at, wait);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuGreenCtxWaitEvent(CUgreenCtx green, CUevent event) {
    CUcontext context;
    CUresult result = cuCtxFromGreenCtx(&context, green);
    return result == CUDA_SUCCESS ? cuCtxWaitEvent(context, event) : result;
}
