/* Durations of graphs: learned while launches are metered, so that a graph that does not fit the rest of the quantum
 * can wait for the next.
 *
 * Guarantees:
 * - Nothing is measured while the tenant holds alone, or while no end of the quantum is known.
 * - Durations while other tenants co-run are kept separate from other durations.
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
    struct hash_link link; /* first */
    CUgraphExec exec;
    uint64_t duration[2];  /* ns, alone and while other tenants run at the same time; 0: not measured yet */
    uint64_t co_runs;      /* as `pace_others`, before the launch that is measured */
    CUcontext context;     /* of the events */
    uint32_t epoch;        /* which context of that handle */
    uint32_t launches;     /* metered ones */
    CUevent before, after; /* around a launch; NULL: none yet, or a thread has them */
    bool measuring;        /* a thread is launching between the events */
    bool pending;          /* the events are recorded, and not read yet */
};

struct graphs {
    struct lock lock;
    struct slab slab;
    struct hashed known; /* struct known_graph */
};

/* The events that a thread has in hand while it launches a graph. */
struct graph_measure {
    bool taken; /* the launch is to be measured */
    CUcontext context;
    uint32_t epoch;
    CUevent before, after;
};

/* Return how long the graph is expected to take, ns; 0: not known. `co_runs`: of the gate. */
uint64_t graph_times_expected(struct graphs *graphs, struct streams *streams, CUgraphExec exec, uint64_t co_runs);
/* Begin a metered launch into the stream of the queue, before the driver's call. `co_runs`: of the gate. */
struct graph_measure graph_times_begin(struct graphs *graphs, struct streams *streams, CUgraphExec exec,
                                       const struct queue *queue, uint64_t co_runs);
/* Record an event of the measure on the stream of the queue, made if need be. False: the driver makes none, or the
 * context has ended. */
bool graph_times_record(CUevent *event, const struct graph_measure *measure, struct queue *queue, CUstream stream);
/* End a launch that is measured. `recorded`: both events are. */
void graph_times_finish(struct graphs *graphs, struct streams *streams, CUgraphExec exec,
                        const struct graph_measure *measure, bool recorded);
/* Forget the graph: it has ended, or is another one. */
void graph_times_forget(struct graphs *graphs, struct streams *streams, CUgraphExec exec);

#endif
