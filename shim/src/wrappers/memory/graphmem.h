/* Memory of graphs with memory nodes: charges of the graph pools for each launch and upload.
 *
 * The driver allocates no memory for a memory node until its executable graph is first launched or uploaded. Afterwards
 * the memory stays in the device's graph pool, for the next graph of the process.
 *
 * Guarantees:
 * - Before a launch or an upload, the bytes that it may take are charged (C8, pool_memory.h). After it, the driver's
 *   byte count is charged (C7, pool_memory.h).
 * - A launch cannot be undone. If it has allocated memory over the limit, that memory is counted (C5, memory/state.h).
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

/* Charge a launch or upload before the driver's call. Return CUDA_ERROR_OUT_OF_MEMORY if the limit forbids the call.
 * Costs one load if no graph of the process has memory nodes. */
CUresult graphmem_begin(struct graph_reservation *reservation, CUgraphExec exec);
/* After the driver's call: charge the memory that the driver has allocated. `result`: the driver's answer. */
void graphmem_end(struct graph_reservation *reservation, CUresult result);

/* Register the device's graph pool, because a graph is about to get a node that allocates memory on the device. */
void graphmem_expect(CUdevice device);
/* After an instantiation: record the memory that a launch of the executable graph may allocate on each device. */
void graphmem_instantiated(CUgraphExec exec, CUgraph graph);
/* Remove the entries of an executable graph that was destroyed. */
void graphmem_destroyed(CUgraphExec exec);

#endif
