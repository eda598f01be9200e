/* Device memory that graphs allocate. With fake_lock. */
#ifndef FAKECUDA_GRAPHMEMORY_H
#define FAKECUDA_GRAPHMEMORY_H

#include "fake.h"

struct graph;

/* What one executable graph needs of the device's graph memory. */
struct fake_footprint {
    int device;
    uint64_t bytes;
    bool mapped;
};

/* Adds what the graph's nodes allocate. */
void fake_footprint_of(const struct graph *graph, struct fake_footprint *out);
/* Takes the memory, once. */
CUresult fake_footprint_map(struct fake_footprint *footprint);
/* The executable graph is gone; its memory stays with the device's graph memory. */
void fake_footprint_drop(struct fake_footprint *footprint);

#endif
