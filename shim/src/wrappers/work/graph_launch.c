/* See graphs.h. The wrapped launches of graphs, and what ends or changes one.
 *
 * Under a metered grant events are recorded around the first launches of a graph and then around every eighth. Its
 * duration is what they say: at once if it is longer than before, by and by if it is shorter. A launch that would end
 * after the quantum waits for the next opening of the gate, once: one that is longer than any quantum runs at the
 * beginning of one. Alone, or while no end of the quantum is known, nothing is measured and nothing waits.
 */
#include "time/graph_times.h"

#include "wrappers/work/passthrough.h"
#include "wrappers/memory/graphmem.h"

enum { MEASURED_AT_FIRST = 3, MEASURED_EACH = 8 };

/* What a thread has in hand while it launches. */
struct measure {
    bool taken;
    CUcontext context;
    uint32_t epoch;
    CUevent before, after;
};

/* With the lock. */
static struct known_graph *find(struct graphs *graphs, CUgraphExec exec) {
    struct known_graph *rows = graphs->rows.rows;
    for (unsigned i = 0; i < graphs->rows.count; i++)
        if (rows[i].exec == exec)
            return &rows[i];
    return NULL;
}

/* With the lock. NULL: no memory, the graph is launched without being measured. */
static struct known_graph *note(struct graphs *graphs, CUgraphExec exec) {
    struct known_graph *known = find(graphs, exec);
    if (known == NULL && (known = find(graphs, NULL)) == NULL && rows_room(&graphs->rows, sizeof *known))
        known = (struct known_graph *)graphs->rows.rows + graphs->rows.count++;
    if (known != NULL && known->exec == NULL)
        *known = (struct known_graph){.exec = exec};
    return known;
}

static void destroy_events(CUcontext context, uint32_t epoch, CUevent before, CUevent after) {
    CUevent events[] = {before, after};
    streams_destroy_events(&the_process->streams, context, epoch, events, 2);
}

/* With the lock: takes over what the events of an earlier launch say, if they have come. */
static void learn(struct known_graph *known) {
    float milliseconds = 0;
    CUstreamCaptureMode mode = own_calls_begin();
    CUresult result = DRIVER(cuEventQuery)(known->after);
    if (result == CUDA_SUCCESS)
        result = HAS(cuEventElapsedTime_v2) ? DRIVER(cuEventElapsedTime_v2)(&milliseconds, known->before, known->after)
                                            : DRIVER(cuEventElapsedTime)(&milliseconds, known->before, known->after);
    own_calls_end(mode);
    if (result == CUDA_ERROR_NOT_READY)
        return;
    known->pending = false;
    if (result != CUDA_SUCCESS || !(milliseconds > 0) || milliseconds > 1e6f)
        return;
    uint64_t duration = (uint64_t)((double)milliseconds * 1e6);
    known->duration = duration >= known->duration ? duration : known->duration - (known->duration - duration) / 4;
}

/* How long the graph is expected to take, ns; 0: not known. */
static uint64_t expected(struct graphs *graphs, CUgraphExec exec) {
    lock(&graphs->lock);
    struct known_graph *known = find(graphs, exec);
    if (known != NULL && known->pending)
        learn(known);
    uint64_t duration = known != NULL ? known->duration : 0;
    unlock(&graphs->lock);
    return duration;
}

/* Whether it would be over by the end of the quantum, behind what the thread launched into that stream before. */
static bool fits(const struct slot_stream *entry, uint64_t duration, uint64_t deadline) {
    uint64_t now = sys_now(), begins = entry->estimate.graphs_end_at > now ? entry->estimate.graphs_end_at : now;
    return deadline == SYS_NEVER || begins + duration <= deadline;
}

static struct measure begin(struct graphs *graphs, CUgraphExec exec, const struct slot_stream *entry) {
    struct measure measure = {.context = entry->registered.context, .epoch = entry->registered.context_epoch},
                   stale = {0};
    if (!HAS(cuEventElapsedTime) && !HAS(cuEventElapsedTime_v2))
        return measure;
    lock(&graphs->lock);
    struct known_graph *known = note(graphs, exec);
    if (known != NULL && !known->measuring && !known->pending &&
        (known->launches < MEASURED_AT_FIRST || known->launches % MEASURED_EACH == 0)) {
        known->measuring = measure.taken = true;
        struct measure *to =
            known->context == entry->registered.context && known->epoch == entry->registered.context_epoch ? &measure
                                                                                                           : &stale;
        to->before = known->before;
        to->after = known->after;
        stale.context = known->context;
        stale.epoch = known->epoch;
        known->context = entry->registered.context;
        known->epoch = entry->registered.context_epoch;
        known->before = known->after = NULL;
    }
    if (known != NULL)
        known->launches++;
    unlock(&graphs->lock);
    destroy_events(stale.context, stale.epoch, stale.before, stale.after);
    return measure;
}

static bool record(CUevent *event, const struct measure *measure, CUstream stream) {
    CUstreamCaptureMode mode = own_calls_begin();
    if (*event == NULL)
        *event = event_make(measure->context, CU_EVENT_DEFAULT);
    bool recorded = *event != NULL && DRIVER(cuEventRecord)(*event, stream) == CUDA_SUCCESS;
    own_calls_end(mode);
    return recorded;
}

static void finish(struct graphs *graphs, CUgraphExec exec, const struct measure *measure, bool recorded) {
    lock(&graphs->lock);
    struct known_graph *known = find(graphs, exec);
    bool kept =
        known != NULL && known->measuring && known->context == measure->context && known->epoch == measure->epoch;
    if (kept) {
        known->before = measure->before;
        known->after = measure->after;
        known->measuring = false;
        known->pending = recorded;
    }
    unlock(&graphs->lock);
    if (!kept)
        destroy_events(measure->context, measure->epoch, measure->before, measure->after);
}

/* The graph has ended, or is another one: what was learned of it is void. */
static void forget(CUgraphExec exec) {
    struct graphs *graphs = &the_process->graphs;
    lock(&graphs->lock);
    struct known_graph *known = find(graphs, exec), gone = {0};
    if (known != NULL && exec != NULL) {
        gone = *known;
        *known = (struct known_graph){0};
    }
    unlock(&graphs->lock);
    destroy_events(gone.context, gone.epoch, gone.before, gone.after);
}

typedef CUresult (*launch_call)(CUgraphExec, CUstream);

static CUresult launch_metered(launch_call launch, struct passage *passage, CUgraphExec exec, CUstream stream,
                               bool per_thread, uint64_t duration) {
    struct graphs *graphs = &the_process->graphs;
    struct slot_stream *entry = passage->stream;
    struct measure measure = begin(graphs, exec, entry);
    CUstream named = stream == NULL && per_thread ? CU_STREAM_PER_THREAD : stream;
    bool recorded = measure.taken && record(&measure.before, &measure, named);
    CUresult result = launch(exec, stream);
    recorded = recorded && result == CUDA_SUCCESS && record(&measure.after, &measure, named);
    if (measure.taken)
        finish(graphs, exec, &measure, recorded);
    if (duration > 0) {
        uint64_t now = sys_now();
        entry->estimate.last_graph_ns = duration;
        entry->estimate.graphs_end_at =
            (entry->estimate.graphs_end_at > now ? entry->estimate.graphs_end_at : now) + duration;
    }
    passage_leave(passage);
    return result;
}

/* Through the gate when it is closed, metered or new to the stream. */
static CUresult launch_slowly(launch_call launch, CUgraphExec exec, CUstream stream, bool per_thread) {
    for (bool deferred = false;; deferred = true) {
        struct passage passage = enter(stream, per_thread);
        if (passage.refused != CUDA_SUCCESS)
            return passage.refused;
        if (launch == NULL || passage.gate == NULL || passage.stream == NULL || !passage.stream->registered.metered) {
            CUresult result = launch ? launch(exec, stream) : CUDA_ERROR_NOT_FOUND;
            passage_leave(&passage);
            return result;
        }
        struct gate *gate = &the_process->gate;
        if (passage.waited)
            passage.stream->estimate.graphs_end_at = 0;
        uint32_t closing = atomic_load(&gate->next_closing);
        uint64_t deadline = atomic_load(&gate->deadline), duration = expected(&the_process->graphs, exec);
        if (deferred || passage.waited || duration == 0 || fits(passage.stream, duration, deadline))
            return launch_metered(launch, &passage, exec, stream, per_thread, duration);
        passage_abandon(&passage);
        passage_wait_next(gate, closing, deadline);
    }
}

static CUresult launch_with_memory(CUresult (*launch)(CUgraphExec, CUstream), CUgraphExec exec, CUstream stream) {
    struct graph_reservation reservation;
    CUresult result = graphmem_begin(&reservation, exec);
    if (result != CUDA_SUCCESS)
        return result;
    result = launch(exec, stream);
    graphmem_end(&reservation, result);
    return result;
}

/* A graph may take memory when it is launched: that is reserved before the gate is entered. */
#define LAUNCH_GRAPH(symbol, per_thread)                                                      \
    static CUresult launch_##symbol(CUgraphExec exec, CUstream stream) {                      \
        struct slot *slot = passage_slot;                                                     \
        struct slot_stream *entry = enter_fast(slot, stream, per_thread);                     \
        if (UNLIKELY(entry == NULL || !HAS(symbol) || entry->registered.metered)) {           \
            if (entry != NULL)                                                                \
                gate_retreat_fast(slot);                                                      \
            return launch_slowly(DRIVER(symbol), exec, stream, per_thread);                   \
        }                                                                                     \
        CUresult result = DRIVER(symbol)(exec, stream);                                       \
        leave_fast(slot, entry);                                                              \
        return result;                                                                        \
    }                                                                                         \
    EXPORT CUresult symbol(CUgraphExec exec, CUstream stream) {                               \
        return UNLIKELY(graph_pool_any()) ? launch_with_memory(launch_##symbol, exec, stream) \
                                          : launch_##symbol(exec, stream);                    \
    }

LAUNCH_GRAPH(cuGraphLaunch, false)
LAUNCH_GRAPH(cuGraphLaunch_ptsz, true)

EXPORT CUresult cuGraphExecDestroy(CUgraphExec exec) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS)
        return result;
    forget(exec);
    graphmem_destroyed(exec);
    return HAS(cuGraphExecDestroy) ? DRIVER(cuGraphExecDestroy)(exec) : CUDA_ERROR_NOT_FOUND;
}

#define FORGETTING(symbol, parameters, ...)                                      \
    EXPORT CUresult symbol parameters {                                          \
        CUresult refused = process_enter();                                      \
        if (refused != CUDA_SUCCESS)                                             \
            return refused;                                                      \
        forget(exec);                                                            \
        return HAS(symbol) ? DRIVER(symbol)(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND; \
    }

FORGETTING(cuGraphExecUpdate, (CUgraphExec exec, CUgraph graph, CUgraphNode *node, CUgraphExecUpdateResult *updated),
           exec, graph, node, updated)
FORGETTING(cuGraphExecUpdate_v2, (CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *updated), exec, graph,
           updated)
