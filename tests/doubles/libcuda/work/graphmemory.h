/* Device memory that graphs allocate. With fake_lock. */
#ifndef FAKECUDA_GRAPHMEMORY_H
#define FAKECUDA_GRAPHMEMORY_H

#include "device/fake.h"

struct graph;
struct node;

/* Need of one executable graph of a device's graph memory. */
struct fake_footprint {
    int device;
    uint64_t bytes;
    bool mapped;
};

/* Get the pages in which the graph's allocations lie. */
void fake_footprint_of(const struct graph *graph, struct fake_footprint *out);
/* Give a node that allocates `asked` bytes its addresses: those of an allocation that the graph has freed, or fresh
 * ones. */
void fake_graph_place(struct graph *graph, struct node *node, uint64_t asked, struct context *context);
/* Note that a node of the graph frees the allocation at an address. */
void fake_graph_frees(struct graph *graph, CUdeviceptr address);
/* Take the memory, once. */
CUresult fake_footprint_map(struct fake_footprint *footprint);
/* Leave the memory of an ended executable graph to the device's graph memory. */
void fake_footprint_drop(struct fake_footprint *footprint);

#endif
