/* Footprint of a graph: the most device memory that its allocation nodes need. */
#ifndef SHAREPOD_FOOTPRINT_H
#define SHAREPOD_FOOTPRINT_H

#include <cuda.h>
#include <stdint.h>

/* Return the bytes of the pages in which the graph's allocations on the device lie, its child graphs' too. The driver
 * gives an allocation its address when its node is made, and may give it again once an earlier allocation of the graph
 * is freed: allocations of one address share their memory. */
uint64_t footprint_of(CUgraph graph, CUdevice device);

#endif
