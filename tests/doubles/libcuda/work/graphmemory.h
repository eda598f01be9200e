/* Device memory that graphs allocate. With fake_lock. */
#ifndef FAKECUDA_GRAPHMEMORY_H
#define FAKECUDA_GRAPHMEMORY_H

#include "device/fake.h"

struct graph;
struct node;

/* What one executable graph needs of the device's graph memory. */
struct fake_footprint {
    int device;
    uint64_t bytes;
    bool mapped;
};

/* The pages in which the graph's allocations lie. */
void fake_footprint_of(const struct graph *graph, struct fake_footprint *out);
/* Gives a node that allocates `asked` bytes its addresses: those of an allocation that the graph has freed, or fresh
 * ones. */
void fake_graph_place(struct graph *graph, struct node *node, uint64_t asked, struct context *context);
/* What is allocated there is freed by the graph itself. */
void fake_graph_frees(struct graph *graph, CUdeviceptr address);
/* Takes the memory, once. */
CUresult fake_footprint_map(struct fake_footprint *footprint);
/* The executable graph is gone; its memory stays with the device's graph memory. */
void fake_footprint_drop(struct fake_footprint *footprint);

#endif
