/* Memory of graphs: nodes that allocate. The driver takes nothing for them until the executable graph is launched or
 * uploaded for the first time, and then keeps what it took for the next ones, per device and process.
 *
 * Guarantees: before a launch or an upload as much is reserved as it may take; afterwards the driver's figure counts.
 * What it takes at a later launch of the same graph, over the limit, is counted as call that no call could refuse.
 */
#ifndef SHAREPOD_GRAPHMEM_H
#define SHAREPOD_GRAPHMEM_H

#include <cuda.h>
#include <stdbool.h>

#include "memory/pools/pool_memory.h"

enum { GRAPHMEM_DEVICES = 16 };

struct graph_reservation {
    unsigned count;
    CUgraphExec exec;
    struct pool_call calls[GRAPHMEM_DEVICES];
};

/* Around the driver's launch or upload. CUDA_ERROR_OUT_OF_MEMORY: it must not be made. Costs one load where no graph of
 * the process has memory nodes. */
CUresult graphmem_begin(struct graph_reservation *reservation, CUgraphExec exec);
void graphmem_end(struct graph_reservation *reservation, CUresult result);

/* Some graph is about to get a node that allocates on that device. */
void graphmem_expect(CUdevice device);
void graphmem_instantiated(CUgraphExec exec, CUgraph graph);
void graphmem_destroyed(CUgraphExec exec);

#endif
