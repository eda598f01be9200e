/* Memory of graphs: the graph pools, around launches and uploads of graphs with nodes that allocate.
 *
 * The driver takes nothing for a memory node until its executable graph is first launched or uploaded. It then keeps
 * the memory in the device's graph pool, for the next graph of the process.
 *
 * Guarantees:
 * - Before a launch or an upload the bytes that it may take are charged (C8); afterwards the driver's figure counts
 *   (C7).
 * - What the driver takes over the limit at a later launch of the same graph is counted (C5).
 */
#ifndef SHAREPOD_GRAPHMEM_H
#define SHAREPOD_GRAPHMEM_H

#include <cuda.h>
#include <stdbool.h>

#include "memory/pools/pool_memory.h"

enum { GRAPHMEM_DEVICES = 16 }; /* as many GPUs as a tenant can have */

/* Charges of one launch or upload, one for each device that the graph allocates on. */
struct graph_reservation {
    unsigned count;
    CUgraphExec exec;
    struct pool_call calls[GRAPHMEM_DEVICES];
};

/* Charge a launch or upload before the driver makes it. CUDA_ERROR_OUT_OF_MEMORY: it must not be made. Costs one load
 * if no graph of the process has memory nodes. */
CUresult graphmem_begin(struct graph_reservation *reservation, CUgraphExec exec);
/* Count the memory that the driver has taken. `result`: its answer. */
void graphmem_end(struct graph_reservation *reservation, CUresult result);

/* Note that a graph is about to get a node that allocates on the device. */
void graphmem_expect(CUdevice device);
/* Record the memory that a launch of the executable graph may take on each device. */
void graphmem_instantiated(CUgraphExec exec, CUgraph graph);
/* Forget an executable graph. */
void graphmem_destroyed(CUgraphExec exec);

#endif
