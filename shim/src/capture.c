/* Stream captures: which are open. A launch into a capturing stream runs nothing and is not gated; while one is open
 * the drain keeps away from calls that would invalidate it. Beginning one takes the registry's lock, so that none
 * begins in the middle of a drain.
 */
#include "process.h"
#include "streams.h"

static struct streams *begin(CUresult *refused) {
    *refused = process_enter();
    if (*refused != CUDA_SUCCESS)
        return NULL;
    lock(&the_process->streams.lock);
    return &the_process->streams;
}

/* One name for each stream: a capture may begin and end by different forms of the calls. */
static CUstream named(CUstream stream, bool per_thread) {
    return stream != NULL ? stream : per_thread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
}

static CUresult begun(struct streams *streams, CUstream stream, bool per_thread, CUresult result) {
    struct gate *gate = &the_process->gate;
    unsigned open = atomic_load(&gate->captures);
    if (result == CUDA_SUCCESS && open < STREAMS_CAPTURES) {
        CUcontext context = NULL;
        if (streams_default(stream) || !HAS(cuStreamGetCtx) || DRIVER(cuStreamGetCtx)(stream, &context) != CUDA_SUCCESS)
            DRIVER(cuCtxGetCurrent)(&context);
        streams->captures[open].context = context;
        streams->captures[open].stream = named(stream, per_thread);
        gate_set_captures(gate, open + 1);
    }
    unlock(&streams->lock);
    return result;
}

static CUresult ended(CUstream stream, bool per_thread, CUresult result) {
    struct streams *streams = &the_process->streams;
    struct gate *gate = &the_process->gate;
    if (result == CUDA_ERROR_ILLEGAL_STATE || result == CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD ||
        result == CUDA_ERROR_STREAM_CAPTURE_UNMATCHED || result == CUDA_ERROR_NOT_FOUND)
        return result; /* the capture, if there is one, goes on */
    lock(&streams->lock);
    for (unsigned i = atomic_load(&gate->captures); i > 0; i--)
        if (streams->captures[i - 1].stream == named(stream, per_thread)) {
            unsigned last = atomic_load(&gate->captures) - 1;
            streams->captures[i - 1] = streams->captures[last];
            gate_set_captures(gate, last);
            break;
        }
    unlock(&streams->lock);
    return result;
}

#define BEGIN(symbol, per_thread, parameters, ...)                                                                   \
    EXPORT CUresult symbol parameters {                                                                              \
        CUresult refused;                                                                                            \
        struct streams *streams = begin(&refused);                                                                   \
        if (streams == NULL)                                                                                         \
            return refused;                                                                                          \
        return begun(streams, stream, per_thread, HAS(symbol) ? DRIVER(symbol)(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND); \
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
