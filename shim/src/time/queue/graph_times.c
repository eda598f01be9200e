/* Measures how long graphs run. Under a metered grant, events are recorded around the first three launches of a graph,
 * and then around every eighth launch. A longer measured duration replaces the old one. A shorter one lowers it by a
 * quarter of the difference.
 *
 * Events are destroyed without the lock of struct graphs, because destroying them takes the lock of struct streams.
 */
#include "time/queue/graph_times.h"

#include "base/sys.h"
#include "driver/entries.h"
#include "driver/own_calls.h"

/* The first MEASURED_AT_FIRST launches are measured, then every MEASURED_EACH-th. A measured launch costs two events.
 */
enum { MEASURED_AT_FIRST = 3, MEASURED_EACH = 8 };
/* DEPTH_MOST: levels of child graphs that are searched. FEW_NODES: up to this many node handles are stored on the
 * stack. */
enum { DEPTH_MOST = 16, FEW_NODES = 64 };

static uint64_t hash_of_graph(CUgraphExec exec) {
    return hash_of((uintptr_t)exec, 0);
}

/* Return the entry of a graph; NULL: there is none. The caller holds the lock. */
static struct known_graph *find(struct graphs *graphs, CUgraphExec exec) {
    uint64_t hash = hash_of_graph(exec);
    for (struct hash_link *link = NULL; (link = hashed_next(&graphs->known, hash, link)) != NULL;)
        if (((struct known_graph *)link)->exec == exec)
            return (struct known_graph *)link;
    return NULL;
}

/* Return the entry of a graph, created if necessary; NULL: no memory, so the graph is launched without a measurement.
 * The caller holds the lock. */
static struct known_graph *note(struct graphs *graphs, CUgraphExec exec) {
    struct known_graph *known = find(graphs, exec);
    if (known != NULL || !hashed_room(&graphs->known) || (known = slab_take(&graphs->slab, sizeof *known)) == NULL)
        return known;
    known->exec = exec;
    hashed_add(&graphs->known, &known->link, hash_of_graph(exec));
    return known;
}

/* Destroy two events of a graph, unless they have ended with their context. The caller must not hold the locks of
 * struct graphs and struct streams. */
static void destroy_events(struct streams *streams, CUcontext context, uint32_t epoch, CUevent before, CUevent after) {
    CUevent events[] = {before, after};
    streams_destroy_events(streams, context, epoch, events, 2);
}

/* Update the duration from the events of an earlier launch, if they have passed and their context has not ended. The
 * caller holds the locks of struct graphs and struct streams. The latter keeps the context from ending. */
static void learn(struct streams *streams, struct known_graph *known, uint64_t co_runs) {
    float milliseconds = 0;
    if (!streams_lives(streams, known->context, known->epoch)) {
        known->before = known->after = NULL;
        known->pending = false;
        return;
    }
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
    uint64_t *learned = &known->duration[(co_runs & 1) || co_runs != known->co_runs];
    *learned = duration >= *learned ? duration : *learned - (*learned - duration) / 4;
}

uint64_t graph_times_expected(struct graphs *graphs, struct streams *streams, CUgraphExec exec, uint64_t co_runs) {
    lock(&graphs->lock);
    struct known_graph *known = find(graphs, exec);
    if (known != NULL && known->pending) {
        lock(&streams->lock);
        learn(streams, known, co_runs);
        unlock(&streams->lock);
    }
    uint64_t duration = known != NULL ? known->duration[co_runs & 1] : 0;
    if (known != NULL && duration == 0)
        duration = known->duration[!(co_runs & 1)];
    unlock(&graphs->lock);
    return duration;
}

struct graph_measure graph_times_begin(struct graphs *graphs, struct streams *streams, CUgraphExec exec,
                                       const struct queue *queue, uint64_t co_runs) {
    struct graph_measure measure = {.context = queue->context, .epoch = queue->epoch}, stale = {0};
    if (!HAS(cuEventElapsedTime) && !HAS(cuEventElapsedTime_v2))
        return measure;
    lock(&graphs->lock);
    struct known_graph *known = note(graphs, exec);
    if (known != NULL && !known->measuring && !known->pending &&
        (known->launches < MEASURED_AT_FIRST || known->launches % MEASURED_EACH == 0)) {
        known->measuring = measure.taken = true;
        known->co_runs = co_runs;
        struct graph_measure *to = known->context == queue->context && known->epoch == queue->epoch ? &measure : &stale;
        to->before = known->before;
        to->after = known->after;
        stale.context = known->context;
        stale.epoch = known->epoch;
        known->context = queue->context;
        known->epoch = queue->epoch;
        known->before = known->after = NULL;
    }
    if (known != NULL)
        known->launches++;
    unlock(&graphs->lock);
    destroy_events(streams, stale.context, stale.epoch, stale.before, stale.after);
    return measure;
}

bool graph_times_record(CUevent *event, const struct graph_measure *measure, struct queue *queue, CUstream stream) {
    if (!streams_call(queue))
        return false;
    CUstreamCaptureMode mode = own_calls_begin();
    if (*event == NULL)
        *event = event_make(measure->context, CU_EVENT_DEFAULT);
    bool recorded = *event != NULL && DRIVER(cuEventRecord)(*event, stream) == CUDA_SUCCESS;
    own_calls_end(mode);
    streams_called(queue);
    return recorded;
}

void graph_times_finish(struct graphs *graphs, struct streams *streams, CUgraphExec exec,
                        const struct graph_measure *measure, bool recorded) {
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
        destroy_events(streams, measure->context, measure->epoch, measure->before, measure->after);
}

/* Remove the entry of a graph. `updated`: the graph was updated and not destroyed, so an entry with waits stays. */
static void forget(struct graphs *graphs, struct streams *streams, CUgraphExec exec, bool updated) {
    lock(&graphs->lock);
    struct known_graph *known = find(graphs, exec), removed = {0};
    if (known != NULL)
        removed = *known;
    if (known != NULL && updated && known->waits) {
        *known = (struct known_graph){.link = removed.link, .exec = exec, .waits = true};
    } else if (known != NULL) {
        hashed_remove(&graphs->known, &known->link);
        slab_give(&graphs->slab, known);
    }
    unlock(&graphs->lock);
    destroy_events(streams, removed.context, removed.epoch, removed.before, removed.after);
}

void graph_times_forget(struct graphs *graphs, struct streams *streams, CUgraphExec exec) {
    forget(graphs, streams, exec, false);
}

void graph_times_updated(struct graphs *graphs, struct streams *streams, CUgraphExec exec) {
    forget(graphs, streams, exec, true);
}

/* Return whether the graph has a node that may wait for the program. */
static bool has_wait(CUgraph graph, int depth) {
    size_t count = 0;
    bool waits = false;
    if (depth > DEPTH_MOST || DRIVER(cuGraphGetNodes)(graph, NULL, &count) != CUDA_SUCCESS || count == 0)
        return false;
    CUgraphNode few[FEW_NODES];
    size_t size = count * sizeof(CUgraphNode);
    CUgraphNode *nodes = count <= FEW_NODES ? few : sys_map(size);
    if (nodes != NULL && DRIVER(cuGraphGetNodes)(graph, nodes, &count) != CUDA_SUCCESS)
        count = 0;
    for (size_t i = 0; nodes != NULL && i < count && !waits; i++) {
        CUgraphNodeType type;
        CUgraph child;
        if (DRIVER(cuGraphNodeGetType)(nodes[i], &type) != CUDA_SUCCESS)
            continue;
        waits = type == CU_GRAPH_NODE_TYPE_HOST || type == CU_GRAPH_NODE_TYPE_BATCH_MEM_OP ||
                type == CU_GRAPH_NODE_TYPE_WAIT_EVENT || type == CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT ||
                (type == CU_GRAPH_NODE_TYPE_GRAPH && HAS(cuGraphChildGraphNodeGetGraph) &&
                 DRIVER(cuGraphChildGraphNodeGetGraph)(nodes[i], &child) == CUDA_SUCCESS && has_wait(child, depth + 1));
    }
    if (nodes != few)
        sys_unmap(nodes, size);
    return waits;
}

void graph_times_instantiated(struct graphs *graphs, CUgraphExec exec, CUgraph graph) {
    if (!HAS(cuGraphGetNodes) || !HAS(cuGraphNodeGetType) || !has_wait(graph, 0))
        return;
    lock(&graphs->lock);
    struct known_graph *known = note(graphs, exec);
    if (known != NULL)
        known->waits = true;
    atomic_store_explicit(&graphs->waits, true, memory_order_relaxed);
    unlock(&graphs->lock);
}

bool graph_times_waits(struct graphs *graphs, CUgraphExec exec) {
    if (!graph_times_any_waits(graphs))
        return false;
    lock(&graphs->lock);
    const struct known_graph *known = find(graphs, exec);
    bool waits = known != NULL && known->waits;
    unlock(&graphs->lock);
    return waits;
}
