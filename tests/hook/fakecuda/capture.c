/* Stream capture and graphs, with the error codes and the invalidations of the real driver.
 *
 * Two of them break naive interposers: a call such as cuEventQuery from any thread while a capture in global mode is
 * open, and cuCtxSynchronize (or cuCtxRecordEvent) on a context in which a stream is capturing. Both fail with
 * CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and invalidate the capture of whoever made it.
 */
#include <stdlib.h>
#include <string.h>

#include "fake.h"

struct graph {
    unsigned magic;
    bool hang;
    uint64_t duration;
    uint64_t kernels;
};

static struct capture *captures;
static __thread CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

static bool forbids(const struct capture *capture) {
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED || capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return false;
    if (pthread_equal(capture->thread, pthread_self()))
        return true;
    return thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

CUresult fake_unsafe_call(void) {
    CUresult result = CUDA_SUCCESS;
    for (struct capture *capture = captures; capture != NULL; capture = capture->next)
        if (forbids(capture)) {
            capture->invalid = true;
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    return result;
}

CUresult fake_sync_call(struct context *context) {
    CUresult result = CUDA_SUCCESS;
    for (struct capture *capture = captures; capture != NULL; capture = capture->next)
        if (capture->context == context) {
            capture->invalid = true;
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    return result;
}

CUresult fake_stream_sync_call(struct stream *stream) {
    if (stream->capture != NULL) {
        stream->capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    CUresult result = fake_order_call(stream);
    return result == CUDA_SUCCESS ? fake_unsafe_call() : result;
}

CUresult fake_order_call(struct stream *stream) {
    CUresult result = CUDA_SUCCESS;
    if (stream != &stream->context->legacy)
        return result;
    for (struct capture *capture = captures; capture != NULL; capture = capture->next)
        if (capture->context == stream->context && !(capture->origin->flags & CU_STREAM_NON_BLOCKING)) {
            capture->invalid = true;
            result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
    return result;
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    CUstreamCaptureMode previous = thread_mode;
    if (*mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    thread_mode = *mode;
    *mode = previous;
    return CUDA_SUCCESS;
}

static CUresult begin(CUstream handle, CUstreamCaptureMode mode, bool per_thread) {
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    struct stream *stream = fake_stream(context, handle, per_thread);
    if (stream == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&fake_lock);
    if (stream == &context->legacy || stream->capture != NULL) {
        result = stream->capture != NULL ? CUDA_ERROR_ILLEGAL_STATE : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    } else {
        struct capture *capture = calloc(1, sizeof *capture);
        struct graph *graph = calloc(1, sizeof *graph);
        graph->magic = MAGIC_GRAPH;
        *capture = (struct capture){
            .mode = mode, .thread = pthread_self(), .context = context, .origin = stream, .graph = graph};
        capture->next = captures;
        captures = capture;
        stream->capture = capture;
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    return begin(stream, mode, false);
}

EXPORT CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode) {
    return begin(stream, mode, true);
}

static void unlink_capture(struct capture *gone) {
    for (struct capture **at = &captures; *at != NULL; at = &(*at)->next)
        if (*at == gone) {
            *at = gone->next;
            break;
        }
    struct context *context = gone->context;
    if (context->per_thread.capture == gone)
        context->per_thread.capture = NULL;
    for (struct stream *stream = context->streams; stream != NULL; stream = stream->next)
        if (stream->capture == gone)
            stream->capture = NULL;
    /* Events of the sequence go on pointing to it: the double keeps the small struct. */
}

static CUresult end(CUstream handle, CUgraph *out, bool per_thread) {
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    struct stream *stream = fake_stream(context, handle, per_thread);
    if (stream == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&fake_lock);
    struct capture *capture = stream->capture;
    if (capture == NULL)
        result = CUDA_ERROR_ILLEGAL_STATE;
    else if (capture->origin != stream)
        result = CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    else if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && !pthread_equal(capture->thread, pthread_self()))
        result = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    else {
        unlink_capture(capture);
        result = capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
        *out = capture->invalid ? NULL : (CUgraph)capture->graph;
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    return end(stream, graph, false);
}

EXPORT CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph) {
    return end(stream, graph, true);
}

void fake_capture_context_gone(struct context *context) {
    for (struct capture *capture = captures, *next; capture != NULL; capture = next) {
        next = capture->next;
        if (capture->context == context)
            unlink_capture(capture);
    }
}

static CUresult status_of(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, bool per_thread) {
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    struct stream *stream = fake_stream(context, handle, per_thread);
    if (stream == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&fake_lock);
    /* The real call reports this without harm to the capture. */
    if (stream == &context->legacy)
        for (struct capture *capture = captures; capture != NULL; capture = capture->next)
            if (capture->context == context && !(capture->origin->flags & CU_STREAM_NON_BLOCKING))
                result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    *status = stream->capture == NULL    ? CU_STREAM_CAPTURE_STATUS_NONE
              : stream->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                         : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if (id != NULL)
        *id = (cuuint64_t)(uintptr_t)stream->capture;
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    return status_of(stream, status, NULL, false);
}

EXPORT CUresult cuStreamIsCapturing_ptsz(CUstream stream, CUstreamCaptureStatus *status) {
    return status_of(stream, status, NULL, true);
}

EXPORT CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id) {
    return status_of(stream, status, id, false);
}

EXPORT CUresult cuStreamGetCaptureInfo_ptsz(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id) {
    return status_of(stream, status, id, true);
}

CUresult fake_capture_kernel(struct stream *stream, uint64_t duration, bool hang) {
    struct capture *capture = stream->capture;
    if (capture == NULL)
        return CUDA_ERROR_NOT_READY;
    if (capture->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    capture->graph->duration += duration;
    capture->graph->kernels++;
    capture->graph->hang |= hang;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphCreate(CUgraph *out, unsigned int flags) {
    struct graph *graph = calloc(1, sizeof *graph);
    (void)flags;
    graph->magic = MAGIC_GRAPH;
    *out = (CUgraph)graph;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph handle, unsigned long long flags) {
    (void)flags;
    if (!fake_is(handle, MAGIC_GRAPH))
        return CUDA_ERROR_INVALID_VALUE;
    struct graph *exec = malloc(sizeof *exec);
    *exec = *(struct graph *)handle;
    exec->magic = MAGIC_EXEC;
    *out = (CUgraphExec)exec;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphInstantiate_v2(CUgraphExec *out, CUgraph graph, CUgraphNode *error, char *log, size_t size) {
    (void)error, (void)log, (void)size;
    return cuGraphInstantiateWithFlags(out, graph, 0);
}

static CUresult destroy(void *handle, unsigned magic) {
    if (!fake_is(handle, magic))
        return CUDA_ERROR_INVALID_VALUE;
    free(handle);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphDestroy(CUgraph graph) {
    return destroy(graph, MAGIC_GRAPH);
}

EXPORT CUresult cuGraphExecDestroy(CUgraphExec exec) {
    return destroy(exec, MAGIC_EXEC);
}

static CUresult launch_graph(CUgraphExec handle, CUstream stream_handle, bool per_thread) {
    const struct graph *exec = (const struct graph *)handle;
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    struct stream *stream = fake_stream(context, stream_handle, per_thread);
    if (stream == NULL || !fake_is(exec, MAGIC_EXEC))
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&fake_lock);
    result = fake_submit_kernel(stream, exec->duration, exec->hang);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
    return launch_graph(exec, stream, false);
}

EXPORT CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream) {
    return launch_graph(exec, stream, true);
}
