/* Wrapped begin and end of stream captures. The registry lists the open captures.
 *
 * A launch into a capturing stream runs nothing, and bypasses the gate. While a capture is open, the drain avoids calls
 * that would invalidate the capture (R3, streams.h). A capture is recorded before the driver's call that begins it.
 * From then on the drain ignores the capturing stream. No lock is held during the driver's call (R4, streams.h).
 */
#include "driver/own_calls.h"
#include "process/process.h"
#include "time/captures.h"
#include "time/gate/passage.h"
#include "time/queue/meter.h"
#include "time/streams.h"

/* A capture that is about to begin. */
struct beginning {
    CUresult refused; /* CUDA_SUCCESS, or the error that the call must return */
    struct open_capture capture;
};

/* Record a capture that is about to begin. First record fences behind the launched work of all streams (R5, streams.h),
 * because neither a capturing stream nor a stream that joins the capture can be queried. Exception: the legacy stream
 * never captures, and an event in it would order other streams (D4, drain.h). Only this thread can record a fence in
 * its own default stream. */
static struct beginning begin(CUstream stream, bool per_thread) {
    struct beginning beginning = {.refused = process_enter()};
    if (beginning.refused != CUDA_SUCCESS)
        return beginning;
    struct streams *streams = &the_process->streams;
    beginning.capture.context = context_of_stream(stream);
    beginning.capture.stream = stream_named(stream, per_thread);
    if (passage_slot != NULL)
        meter_before_wait(&the_process->gate, streams, passage_slot);
    lock(&streams->lock);
    for (struct known_stream *next, *row = streams->busy; row != NULL; row = next) {
        next = row->busy_next;
        if (row->pending && row->stream != NULL)
            captures_fence(streams, row, false);
    }
    if (!captures_note(streams, &the_process->gate, &beginning.capture))
        beginning.refused = CUDA_ERROR_OUT_OF_MEMORY;
    unlock(&streams->lock);
    own_calls_settle();
    return beginning;
}

/* Remove the entry of the capture in this stream. `context` NULL: in any context. */
static void forget(CUcontext context, CUstream stream) {
    struct streams *streams = &the_process->streams;
    lock(&streams->lock);
    for (unsigned i = streams->captures.count; i > 0; i--) {
        const struct open_capture *capture = streams_capture(streams, i - 1);
        if (!capture->joins && capture->stream == stream && (context == NULL || capture->context == context)) {
            captures_forget(streams, &the_process->gate, i - 1);
            break;
        }
    }
    unlock(&streams->lock);
}

/* After the driver's call: if the call has failed, remove the entry of its capture. */
static CUresult begun(const struct beginning *beginning, CUresult result) {
    if (result != CUDA_SUCCESS)
        forget(beginning->capture.context, beginning->capture.stream);
    return result;
}

/* After the driver's call: remove the capture's entry, unless the capture continues. */
static CUresult ended(CUstream stream, bool per_thread, CUresult result) {
    switch (result) {
    case CUDA_ERROR_ILLEGAL_STATE:
    case CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD:
    case CUDA_ERROR_STREAM_CAPTURE_UNMATCHED:
    case CUDA_ERROR_NOT_FOUND: return result; /* the capture, if there is one, continues */
    default:
        forget(stream_is_default(stream) ? context_of_stream(stream) : NULL, stream_named(stream, per_thread));
        return result;
    }
}

#define BEGIN(symbol, per_thread, parameters, ...)                                                  \
    EXPORT CUresult symbol parameters {                                                             \
        struct beginning beginning = begin(stream, per_thread);                                     \
        if (beginning.refused != CUDA_SUCCESS)                                                      \
            return beginning.refused;                                                               \
        return begun(&beginning, HAS(symbol) ? DRIVER(symbol)(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND); \
    }

#define END(symbol, per_thread, parameters, ...)                                                            \
    EXPORT CUresult symbol parameters {                                                                     \
        CUresult refused = process_enter();                                                                 \
        if (refused != CUDA_SUCCESS)                                                                        \
            return refused;                                                                                 \
        return ended(stream, per_thread, HAS(symbol) ? DRIVER(symbol)(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND); \
    }

BEGIN(cuStreamBeginCapture, false, (CUstream stream), stream)
BEGIN(cuStreamBeginCapture_ptsz, true, (CUstream stream), stream)
BEGIN(cuStreamBeginCapture_v2, false, (CUstream stream, CUstreamCaptureMode mode), stream, mode)
BEGIN(cuStreamBeginCapture_v2_ptsz, true, (CUstream stream, CUstreamCaptureMode mode), stream, mode)
BEGIN(cuStreamBeginCaptureToGraph, false,
      (CUstream stream, CUgraph graph, const CUgraphNode *nodes, const CUgraphEdgeData *edges, size_t count,
       CUstreamCaptureMode mode),
      stream, graph, nodes, edges, count, mode)
BEGIN(cuStreamBeginCaptureToGraph_ptsz, true,
      (CUstream stream, CUgraph graph, const CUgraphNode *nodes, const CUgraphEdgeData *edges, size_t count,
       CUstreamCaptureMode mode),
      stream, graph, nodes, edges, count, mode)
BEGIN(cuStreamBeginRecaptureToGraph, false,
      (CUstream stream, CUstreamCaptureMode mode, CUgraph graph, CUgraphRecaptureCallback callback, void *argument),
      stream, mode, graph, callback, argument)
BEGIN(cuStreamBeginRecaptureToGraph_ptsz, true,
      (CUstream stream, CUstreamCaptureMode mode, CUgraph graph, CUgraphRecaptureCallback callback, void *argument),
      stream, mode, graph, callback, argument)
BEGIN(cuStreamBeginCaptureToCig, false, (CUstream stream, CUstreamCigCaptureParams *parameters), stream, parameters)
BEGIN(cuStreamBeginCaptureToCig_ptsz, true, (CUstream stream, CUstreamCigCaptureParams *parameters), stream, parameters)
END(cuStreamEndCapture, false, (CUstream stream, CUgraph *graph), stream, graph)
END(cuStreamEndCapture_ptsz, true, (CUstream stream, CUgraph *graph), stream, graph)
END(cuStreamEndCaptureToCig, false, (CUstream stream), stream)
END(cuStreamEndCaptureToCig_ptsz, true, (CUstream stream), stream)
