/* Calls that add and query graph nodes. Dependencies are not stored: nodes run in the order in which they were added,
 * and a node can depend only on earlier ones. */
#include "work/graph.h"
#include "work/graphmemory.h"
#include "memory/memory.h"
#include "work/module.h"

static CUresult add(CUgraphNode *out, CUgraph graph, struct node node) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    if (out == NULL || !fake_is(graph, MAGIC_GRAPH))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    *out = (CUgraphNode)fake_graph_add((struct graph *)graph, node);
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphAddEmptyNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count) {
    (void)dependencies, (void)count;
    return add(out, graph, (struct node){.work.type = CU_GRAPH_NODE_TYPE_EMPTY});
}

EXPORT CUresult cuGraphAddKernelNode_v2(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                        const CUDA_KERNEL_NODE_PARAMS *params) {
    struct node node = {.magic = MAGIC_NODE};
    (void)dependencies, (void)count;
    if (params == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = fake_kernel_work(params->func, params->kernelParams, &node.work);
    return result == CUDA_SUCCESS ? add(out, graph, node) : result;
}

EXPORT CUresult cuGraphAddHostNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                   const CUDA_HOST_NODE_PARAMS *params) {
    (void)dependencies, (void)count;
    if (params == NULL || params->fn == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    struct work work = {.type = CU_GRAPH_NODE_TYPE_HOST, .function = params->fn, .argument = params->userData};
    return add(out, graph, (struct node){.work = work});
}

EXPORT CUresult cuGraphAddChildGraphNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                         CUgraph child) {
    (void)dependencies, (void)count;
    if (!fake_is(child, MAGIC_GRAPH) || !fake_is(graph, MAGIC_GRAPH) || out == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    struct node node = {.work.type = CU_GRAPH_NODE_TYPE_GRAPH, .child = fake_graph_clone((const struct graph *)child)};
    return add(out, graph, node);
}

EXPORT CUresult cuGraphAddMemAllocNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                       CUDA_MEM_ALLOC_NODE_PARAMS *params) {
    (void)dependencies, (void)count;
    if (params == NULL || params->bytesize == 0 || out == NULL || !fake_is(graph, MAGIC_GRAPH) ||
        params->poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    struct node node = {.work.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC};
    CUresult result = fake_find_device(params->poolProps.location.id, &node.device);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    fake_graph_place((struct graph *)graph, &node, params->bytesize, NULL);
    pthread_mutex_unlock(&fake_lock);
    params->dptr = node.address;
    return add(out, graph, node);
}

EXPORT CUresult cuGraphAddMemFreeNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                      CUdeviceptr address) {
    (void)dependencies, (void)count;
    CUresult result = add(out, graph, (struct node){.work.type = CU_GRAPH_NODE_TYPE_MEM_FREE, .address = address});
    pthread_mutex_lock(&fake_lock);
    if (result == CUDA_SUCCESS)
        fake_graph_frees((struct graph *)graph, address);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuGraphAddNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                               CUgraphNodeParams *params) {
    if (params == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    switch (params->type) {
    case CU_GRAPH_NODE_TYPE_EMPTY: return cuGraphAddEmptyNode(out, graph, dependencies, count);
    case CU_GRAPH_NODE_TYPE_GRAPH:
        return cuGraphAddChildGraphNode(out, graph, dependencies, count, params->graph.graph);
    case CU_GRAPH_NODE_TYPE_MEM_FREE: return cuGraphAddMemFreeNode(out, graph, dependencies, count, params->free.dptr);
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC: {
        CUDA_MEM_ALLOC_NODE_PARAMS alloc = {.poolProps = params->alloc.poolProps, .bytesize = params->alloc.bytesize};
        CUresult result = cuGraphAddMemAllocNode(out, graph, dependencies, count, &alloc);
        params->alloc.dptr = alloc.dptr;
        return result;
    }
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}

EXPORT CUresult cuGraphAddNode_v2(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies,
                                  const CUgraphEdgeData *edges, size_t count, CUgraphNodeParams *params) {
    (void)edges;
    return cuGraphAddNode(out, graph, dependencies, count, params);
}

EXPORT CUresult cuGraphAddNode_v3(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies,
                                  const CUgraphEdgeData *edges, size_t count, CUgraphNodeParams *params) {
    return cuGraphAddNode_v2(out, graph, dependencies, edges, count, params);
}

EXPORT CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode *nodes, size_t *count) {
    const struct graph *graph = (const struct graph *)handle;
    if (!fake_is(graph, MAGIC_GRAPH) || count == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    size_t room = nodes == NULL ? 0 : *count, at = 0;
    for (struct node *node = graph->first; node != NULL && at < room; node = node->next)
        nodes[at++] = (CUgraphNode)node;
    for (size_t i = at; i < room; i++)
        nodes[i] = NULL;
    *count = nodes == NULL ? graph->count : at;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphNodeGetType(CUgraphNode handle, CUgraphNodeType *type) {
    if (!fake_is(handle, MAGIC_NODE))
        return CUDA_ERROR_INVALID_VALUE;
    *type = ((const struct node *)handle)->work.type;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode handle, CUgraph *out) {
    const struct node *node = (const struct node *)handle;
    if (!fake_is(node, MAGIC_NODE) || node->child == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (CUgraph)node->child;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphMemAllocNodeGetParams(CUgraphNode handle, CUDA_MEM_ALLOC_NODE_PARAMS *out) {
    const struct node *node = (const struct node *)handle;
    if (!fake_is(node, MAGIC_NODE) || node->work.type != CU_GRAPH_NODE_TYPE_MEM_ALLOC)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (CUDA_MEM_ALLOC_NODE_PARAMS){
        .poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = fake_ordinal_of(node->device)}},
        .bytesize = node->bytes,
        .dptr = node->address};
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphMemFreeNodeGetParams(CUgraphNode handle, CUdeviceptr *out) {
    const struct node *node = (const struct node *)handle;
    if (!fake_is(node, MAGIC_NODE) || node->work.type != CU_GRAPH_NODE_TYPE_MEM_FREE)
        return CUDA_ERROR_INVALID_VALUE;
    *out = node->address;
    return CUDA_SUCCESS;
}
