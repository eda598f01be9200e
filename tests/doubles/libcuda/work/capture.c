/* Stream capture and graphs, with the error codes and the invalidations of the real driver.
 *
 * A hook that makes driver calls of its own must avoid two kinds. One is a call such as cuEventQuery from any thread,
 * while a capture in global mode is open. The other is cuCtxSynchronize (or cuCtxRecordEvent) on a context in which a
 * stream captures. Both fail with CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and invalidate the capture.
 */
#include <stdlib.h>
#include <string.h>

#include "work/graph.h"

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

CUresult fake_not_captured(struct stream *stream) {
    if (stream->capture != NULL) {
        stream->capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return fake_order_call(stream);
}

CUresult fake_stream_sync_call(struct stream *stream) {
    CUresult result = fake_not_captured(stream);
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

static CUresult begin(CUstream handle, struct capture wanted) {
    struct stream *stream;
    CUresult result = fake_enter_stream(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (wanted.mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    fake_take_time("FAKE_CUDA_CAPTURE_MS");
    pthread_mutex_lock(&fake_lock);
    if (stream == &stream->context->legacy || stream->capture != NULL) {
        result = stream->capture != NULL ? CUDA_ERROR_ILLEGAL_STATE : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    } else {
        struct capture *capture = malloc(sizeof *capture);
        *capture = wanted;
        capture->thread = pthread_self();
        capture->context = stream->context;
        capture->origin = stream;
        if (capture->graph == NULL) {
            capture->graph = fake_graph_new();
            capture->owns_graph = true;
        }
        capture->next = captures;
        captures = capture;
        stream->capture = capture;
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    return begin(stream, (struct capture){.mode = mode});
}

EXPORT CUresult cuStreamBeginCapture(CUstream stream) {
    return cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

EXPORT CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *dependencies,
                                            const CUgraphEdgeData *edges, size_t count, CUstreamCaptureMode mode) {
    (void)dependencies, (void)edges, (void)count;
    if (!fake_is(graph, MAGIC_GRAPH))
        return CUDA_ERROR_INVALID_VALUE;
    return begin(stream, (struct capture){.mode = mode, .graph = (struct graph *)graph});
}

EXPORT CUresult cuStreamBeginRecaptureToGraph(CUstream stream, CUstreamCaptureMode mode, CUgraph handle,
                                              CUgraphRecaptureCallback mismatch, void *argument) {
    struct graph *graph = (struct graph *)handle;
    if (!fake_is(graph, MAGIC_GRAPH))
        return CUDA_ERROR_INVALID_VALUE;
    struct capture wanted = {.mode = mode,
                             .graph = graph,
                             .recaptures = true,
                             .recaptured = graph->first,
                             .mismatch = mismatch,
                             .argument = argument};
    return begin(stream, wanted);
}

static void unlink_capture(struct capture *ended) {
    ended->over = true;
    for (struct capture **at = &captures; *at != NULL; at = &(*at)->next)
        if (*at == ended) {
            *at = ended->next;
            break;
        }
    struct context *context = ended->context;
    for (struct stream *stream = context->per_thread; stream != NULL; stream = stream->next)
        if (stream->capture == ended)
            stream->capture = NULL;
    for (struct stream *stream = context->streams; stream != NULL; stream = stream->next)
        if (stream->capture == ended)
            stream->capture = NULL;
    /* The struct is never freed, because events of the capture may still point to it. */
}

EXPORT CUresult cuStreamEndCapture(CUstream handle, CUgraph *out) {
    struct stream *stream;
    CUresult result = fake_enter_stream(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
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
        if (capture->recaptures && capture->recaptured != NULL)
            capture->invalid = true; /* fewer nodes than the graph had */
        result = capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
        if (capture->invalid && capture->owns_graph)
            fake_graph_free(capture->graph);
        if (out != NULL)
            *out = capture->invalid ? NULL : (CUgraph)capture->graph;
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

void fake_capture_context_gone(struct context *context) {
    for (struct capture *capture = captures, *next; capture != NULL; capture = next) {
        next = capture->next;
        if (capture->context == context)
            unlink_capture(capture);
    }
}

static CUresult status_of(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph) {
    struct stream *stream;
    CUresult result = fake_enter_stream(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    /* The real call reports this without invalidating the capture. */
    if (stream == &stream->context->legacy)
        for (struct capture *capture = captures; capture != NULL; capture = capture->next)
            if (capture->context == stream->context && !(capture->origin->flags & CU_STREAM_NON_BLOCKING))
                result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    *status = stream->capture == NULL    ? CU_STREAM_CAPTURE_STATUS_NONE
              : stream->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                         : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if (id != NULL)
        *id = (cuuint64_t)(uintptr_t)stream->capture;
    if (graph != NULL)
        *graph = stream->capture == NULL ? NULL : (CUgraph)stream->capture->graph;
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    if (status == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = status_of(stream, status, NULL, NULL);
    fake_take_time("FAKE_CUDA_CAPTURE_MS");
    fake_take_time("FAKE_CUDA_CAPTURE_MS"); /* twice as long as the beginning of a capture takes, so that one can begin
                                               before this call returns */
    return result;
}

EXPORT CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id) {
    if (status == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    return status_of(stream, status, id, NULL);
}

EXPORT CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id,
                                          CUgraph *graph, const CUgraphNode **dependencies, size_t *count) {
    if (status == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (dependencies != NULL)
        *dependencies = NULL;
    if (count != NULL)
        *count = 0;
    return status_of(stream, status, id, graph);
}

EXPORT CUresult cuStreamGetCaptureInfo_v3(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id,
                                          CUgraph *graph, const CUgraphNode **dependencies,
                                          const CUgraphEdgeData **edges, size_t *count) {
    if (status == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (edges != NULL)
        *edges = NULL;
    return cuStreamGetCaptureInfo_v2(stream, status, id, graph, dependencies, count);
}

static bool alike(const struct node *a, const struct node *b) {
    return a->work.device_ns == b->work.device_ns && a->work.copy_ns == b->work.copy_ns && a->bytes == b->bytes;
}

/* Compare a recorded node with the existing node of the graph, and replace that node's parameters. Releases fake_lock
 * during the program's callback. */
static CUresult recapture(struct capture *capture, const struct node *node) {
    struct node *before = capture->recaptured;
    CUresult result = before != NULL && before->work.type == node->work.type ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    bool mismatch = result == CUDA_SUCCESS && !alike(before, node);
    if (mismatch && node->bytes > 0)
        result = CUDA_ERROR_INVALID_VALUE; /* memory nodes must be the same */
    else if (mismatch && capture->mismatch != NULL) {
        CUgraphNodeParams was = {.type = before->work.type}, is = {.type = node->work.type};
        pthread_mutex_unlock(&fake_lock);
        result = capture->mismatch(capture->argument, (CUgraphNode)before, &was, &is,
                                   CU_GRAPH_RECAPTURE_ELIGIBLE_FOR_UPDATE);
        pthread_mutex_lock(&fake_lock);
    }
    if (result == CUDA_SUCCESS) {
        before->work = node->work;
        capture->recaptured = before->next;
    } else {
        capture->invalid = true;
    }
    return result;
}

CUresult fake_capture_node(struct stream *stream, const struct node *node) {
    struct capture *capture = stream->capture;
    if (capture->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (capture->recaptures)
        return recapture(capture, node);
    fake_graph_add(capture->graph, *node);
    return CUDA_SUCCESS;
}
