/* Wrapped launches of graphs, and calls that destroy or change an executable graph.
 *
 * Under a metered grant, a launch that would end after the quantum waits for the next quantum, but only once. So a
 * graph that is longer than any quantum runs at the beginning of a quantum. If the tenant holds the GPU alone, or the
 * end of the quantum is not known, no launch waits, and the fast path is the same as for kernels (G2, gate.h). A graph
 * may take memory when it is launched. That memory is charged before the thread enters the gate.
 */
#include "driver/entries.h"
#include "process/process.h"
#include "time/queue/graph_times.h"
#include "time/waits.h"
#include "wrappers/memory/graphmem.h"
#include "wrappers/work/passthrough.h"

typedef CUresult (*launch_call)(CUgraphExec, CUstream);

/* Launch under a metered grant, inside `passage`, and leave the passage. */
static CUresult launch_metered(launch_call launch, struct passage *passage, CUgraphExec exec, CUstream stream,
                               bool per_thread, uint64_t duration) {
    struct graphs *graphs = &the_process->graphs;
    struct streams *streams = &the_process->streams;
    struct graph_measure measure =
        graph_times_begin(graphs, streams, exec, passage->queue, gate_co_runs(passage->gate));
    CUstream named = stream == NULL && per_thread ? CU_STREAM_PER_THREAD : stream;
    bool recorded = measure.taken && graph_times_record(&measure.before, &measure, passage->queue, named);
    CUresult result = launch(exec, stream);
    recorded =
        recorded && result == CUDA_SUCCESS && graph_times_record(&measure.after, &measure, passage->queue, named);
    if (measure.taken)
        graph_times_finish(graphs, streams, exec, &measure, recorded);
    if (result != CUDA_SUCCESS)
        passage->queue = NULL;
    else if (duration > 0)
        pace_graph(&passage->queue->pace, sys_now(), duration);
    passage_leave(passage);
    return result;
}

/* Launch where the fast path does not apply: the gate is closed, the grant is metered, or the thread has not launched
 * into the stream since the gate was opened. */
static CUresult launch_slowly(launch_call launch, CUgraphExec exec, CUstream stream, bool per_thread) {
    for (bool deferred = false;; deferred = true) {
        struct passage passage = enter(stream, per_thread);
        if (passage.refused != CUDA_SUCCESS)
            return passage.refused;
        const struct queue *queue = passage.gate != NULL ? passage.queue : NULL;
        if (launch == NULL || queue == NULL || queue->pace.window.wide ||
            graph_times_waits(&the_process->graphs, exec) || /* the graph waits for the program, or starts behind such a
                                                                wait */
            waits_block(&the_process->streams, passage.queue, NULL)) {
            CUresult result = launch ? launch(exec, stream) : CUDA_ERROR_NOT_FOUND;
            if (result != CUDA_SUCCESS)
                passage.queue = NULL;
            passage_leave(&passage);
            return result;
        }
        struct gate *gate = &the_process->gate;
        uint32_t closing = atomic_load(&gate->next_closing);
        uint64_t deadline = atomic_load(&gate->deadline),
                 duration = graph_times_expected(&the_process->graphs, &the_process->streams, exec, gate_co_runs(gate));
        if (deferred || passage.waited || duration == 0 || pace_graph_fits(&queue->pace, sys_now(), deadline, duration))
            return launch_metered(launch, &passage, exec, stream, per_thread, duration);
        passage_abandon(&passage);
        passage_wait_next(gate, closing, deadline);
    }
}

static CUresult launch_with_memory(launch_call launch, CUgraphExec exec, CUstream stream) {
    struct graph_reservation reservation;
    CUresult result = graphmem_begin(&reservation, exec);
    if (result != CUDA_SUCCESS)
        return result;
    result = launch(exec, stream);
    graphmem_end(&reservation, result);
    return result;
}

/* Return true if a graph of the process may have memory nodes or waits, which need more than the gate. */
static inline bool any_special(void) {
    return graph_pool_any() || (the_process != NULL && graph_times_any_waits(&the_process->graphs));
}

/* Launch a graph that may have memory nodes or waits. Its waits are recorded first, so that no thread waits for a fence
 * behind them (Q6, meter.h). */
static CUresult launch_special(launch_call launch, CUgraphExec exec, CUstream stream, bool per_thread) {
    struct streams *streams = &the_process->streams;
    bool captured = atomic_load(&the_process->gate.captures) > 0 && stream_is_capturing(stream, per_thread);
    bool waits = !captured && graph_times_waits(&the_process->graphs, exec);
    if (waits) {
        atomic_store_explicit(&streams->holds, true, memory_order_relaxed);
        waits_hold_launch(streams, stream_named(stream, per_thread));
    }
    CUresult result = graph_pool_any() ? launch_with_memory(launch, exec, stream) : launch(exec, stream);
    if (waits)
        waits_held(streams);
    return result;
}

#define LAUNCH_GRAPH(symbol, per_thread)                                                           \
    static CUresult launch_##symbol(CUgraphExec exec, CUstream stream) {                           \
        struct slot *slot = passage_slot;                                                          \
        struct queue *queue = enter_fast(slot, stream, per_thread);                                \
        if (UNLIKELY(queue == NULL || !HAS(symbol) || (queue->word & GATE_METERED))) {             \
            if (queue != NULL)                                                                     \
                gate_retreat_fast(slot);                                                           \
            return launch_slowly(DRIVER(symbol), exec, stream, per_thread);                        \
        }                                                                                          \
        CUresult result = DRIVER(symbol)(exec, stream);                                            \
        leave_fast(slot, LIKELY(result == CUDA_SUCCESS) ? queue : NULL);                           \
        return result;                                                                             \
    }                                                                                              \
    EXPORT CUresult symbol(CUgraphExec exec, CUstream stream) {                                    \
        return UNLIKELY(any_special()) ? launch_special(launch_##symbol, exec, stream, per_thread) \
                                       : launch_##symbol(exec, stream);                            \
    }

LAUNCH_GRAPH(cuGraphLaunch, false)
LAUNCH_GRAPH(cuGraphLaunch_ptsz, true)

EXPORT CUresult cuGraphExecDestroy(CUgraphExec exec) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS)
        return result;
    graph_times_forget(&the_process->graphs, &the_process->streams, exec);
    graphmem_destroyed(exec);
    return HAS(cuGraphExecDestroy) ? DRIVER(cuGraphExecDestroy)(exec) : CUDA_ERROR_NOT_FOUND;
}

#define UPDATES(symbol, parameters, ...)                                         \
    EXPORT CUresult symbol parameters {                                          \
        CUresult refused = process_enter();                                      \
        if (refused != CUDA_SUCCESS)                                             \
            return refused;                                                      \
        graph_times_updated(&the_process->graphs, &the_process->streams, exec);  \
        return HAS(symbol) ? DRIVER(symbol)(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND; \
    }

UPDATES(cuGraphExecUpdate, (CUgraphExec exec, CUgraph graph, CUgraphNode *node, CUgraphExecUpdateResult *updated), exec,
        graph, node, updated)
UPDATES(cuGraphExecUpdate_v2, (CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *updated), exec, graph,
        updated)
