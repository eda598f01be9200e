/* Device memory that graphs allocate. With fake_lock. */
#ifndef FAKECUDA_GRAPHMEMORY_H
#define FAKECUDA_GRAPHMEMORY_H

#include "device/fake.h"

struct graph;
struct node;

/* Part of a device's graph memory that one executable graph needs. */
struct fake_footprint {
    int device;
    uint64_t bytes;
    bool mapped;
};

/* Get the pages that contain the graph's allocations. */
void fake_footprint_of(const struct graph *graph, struct fake_footprint *out);
/* Assign addresses to a node that allocates `asked` bytes: the addresses of an allocation that the graph has freed, or
 * new ones. */
void fake_graph_place(struct graph *graph, struct node *node, uint64_t asked, struct context *context);
/* Record that a node of the graph frees the allocation at an address. */
void fake_graph_frees(struct graph *graph, CUdeviceptr address);
/* Take the memory at the first call; later calls do nothing. */
CUresult fake_footprint_map(struct fake_footprint *footprint);
/* Return the memory of a destroyed executable graph to the device's graph memory. */
void fake_footprint_drop(struct fake_footprint *footprint);

#endif
