/* Graphs: lists of nodes that a capture records and a launch runs. With fake_lock. */
#ifndef FAKECUDA_GRAPH_H
#define FAKECUDA_GRAPH_H

#include "device/fake.h"

struct node {
    unsigned magic;
    struct work work;
    struct graph *graph; /* its owner */
    struct graph *child; /* CU_GRAPH_NODE_TYPE_GRAPH: a clone, owned */
    CUdeviceptr address; /* memory nodes */
    uint64_t bytes;
    int device;
    bool freed; /* of an allocation node: a later node of the graph frees it, so the next allocation node may get its
                   addresses */
    struct node *next;
};

struct graph {
    unsigned magic;
    unsigned count;
    struct node *first, *last;
};

struct graph *fake_graph_new(void);
struct graph *fake_graph_clone(const struct graph *graph);
void fake_graph_free(struct graph *graph);
/* Append a copy of the node. */
struct node *fake_graph_add(struct graph *graph, struct node node);

#endif
