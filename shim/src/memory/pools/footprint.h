/* Footprint of a graph: the most device memory that its allocation nodes can need at one time. */
#ifndef SHAREPOD_FOOTPRINT_H
#define SHAREPOD_FOOTPRINT_H

#include <cuda.h>
#include <stdint.h>

/* Return the bytes of all pages that contain allocations of the graph, or of its child graphs, on this device. The
 * driver assigns an address when an allocation node is created. After an earlier allocation of the graph is freed, the
 * driver may assign its address again. Allocations with the same address share their memory, so it counts once. */
uint64_t footprint_of(CUgraph graph, CUdevice device);

#endif
