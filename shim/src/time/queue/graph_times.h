/* Durations of graphs, measured under metered grants, and whether a graph has waits. With a known duration, a graph
 * that does not fit into the rest of the quantum waits for the next quantum.
 *
 * Guarantees:
 * - Nothing is measured while the tenant holds the GPU alone, or while the end of the quantum is not known.
 * - Durations measured while other tenants co-run are stored separately, because they are longer.
 * - The duration of a graph is dropped when the graph is destroyed or updated, because its handle may be reused.
 * - Finding a graph takes the same time for any number of graphs.
 */
#ifndef SHAREPOD_GRAPH_TIMES_H
#define SHAREPOD_GRAPH_TIMES_H

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/hashed.h"
#include "base/slab.h"
#include "base/sys.h"
#include "time/gate/gate.h"
#include "time/streams.h"

struct known_graph {
    struct hash_link link; /* first member */
    CUgraphExec exec;
    uint64_t duration[2];  /* ns. Index 0: while no other tenant co-runs; 1: while others co-run. 0: not measured yet */
    uint64_t co_runs;      /* value of gate_co_runs before the launch that is measured */
    CUcontext context;     /* context of the events */
    uint32_t epoch;        /* epoch of that context */
    uint32_t launches;     /* number of metered launches */
    CUevent before, after; /* events before and after a launch; NULL: not created yet, or in use by a thread */
    bool measuring;        /* a thread is launching the graph between the two events */
    bool pending;          /* the events are recorded, and their times are not read yet */
    bool waits;            /* the graph has a node that waits for the program */
};

struct graphs {
    struct lock lock;
    struct slab slab;
    struct hashed known; /* struct known_graph */
    _Atomic bool waits;  /* a graph with such a node was instantiated */
};

/* Measurement of one launch: the events that the launching thread records around it. */
struct graph_measure {
    bool taken; /* this launch is measured */
    CUcontext context;
    uint32_t epoch;
    CUevent before, after;
};

/* Return the expected duration of the graph, ns; 0: not known. `co_runs`: value of gate_co_runs. */
uint64_t graph_times_expected(struct graphs *graphs, struct streams *streams, CUgraphExec exec, uint64_t co_runs);
/* Before a metered launch into the queue's stream: decide whether this launch is measured, and return its events.
 * `co_runs`: value of gate_co_runs.
 */
struct graph_measure graph_times_begin(struct graphs *graphs, struct streams *streams, CUgraphExec exec,
                                       const struct queue *queue, uint64_t co_runs);
/* Record `*event`, an event of the measurement, in the queue's stream; create it if it is NULL. Return false if the
 * driver refuses, or if the context has ended. */
bool graph_times_record(CUevent *event, const struct graph_measure *measure, struct queue *queue, CUstream stream);
/* End a launch that is measured. `recorded`: both events were recorded. */
void graph_times_finish(struct graphs *graphs, struct streams *streams, CUgraphExec exec,
                        const struct graph_measure *measure, bool recorded);
/* Remove the graph's entry, because the graph was destroyed. */
void graph_times_forget(struct graphs *graphs, struct streams *streams, CUgraphExec exec);
/* Drop the measured durations of a graph that is updated. An update changes no node's type. */
void graph_times_updated(struct graphs *graphs, struct streams *streams, CUgraphExec exec);
/* After an instantiation: record whether the graph or a child graph has a node that may wait for the program. Such
 * nodes are host functions, batches of memory operations, and waits for events or semaphores. */
void graph_times_instantiated(struct graphs *graphs, CUgraphExec exec, CUgraph graph);
/* Return whether any graph has a node that may wait for the program. Costs one load. */
static inline bool graph_times_any_waits(const struct graphs *graphs) {
    return atomic_load_explicit(&graphs->waits, memory_order_relaxed);
}
/* Return whether this graph has a node that may wait for the program. */
bool graph_times_waits(struct graphs *graphs, CUgraphExec exec);

#endif
