/* How much device memory a graph's allocation nodes need at most. */
#ifndef SHAREPOD_FOOTPRINT_H
#define SHAREPOD_FOOTPRINT_H

#include <cuda.h>
#include <stdint.h>

/* Bytes of the pages in which the graph's allocations on the device lie, those of its children too. The driver gives an
 * allocation its address with its node, and the same one again where an earlier allocation of the graph has been freed:
 * there they share their memory. */
uint64_t footprint_of(CUgraph graph, CUdevice device);

#endif
