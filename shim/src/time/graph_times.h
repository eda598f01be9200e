/* How long each graph takes: learned while launches are metered, so that one that does not fit the rest of the quantum
 * waits for the next. */
#ifndef SHAREPOD_GRAPHS_H
#define SHAREPOD_GRAPHS_H

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

#include "time/gate.h"
#include "time/streams.h"
#include "base/sys.h"

struct known_graph {
    CUgraphExec exec;  /* NULL: a free place */
    uint64_t duration; /* ns; 0: not measured yet */
    CUcontext context; /* of the events, and which of that handle */
    uint32_t epoch;
    uint32_t launches;       /* metered ones */
    CUevent before, after;   /* around a launch; NULL: none yet, or a thread has them */
    bool measuring, pending; /* a thread is launching between them; they are recorded */
};

struct graphs {
    struct lock lock;
    struct rows rows; /* struct known_graph */
};

#endif
