/* Graphs of the double: nodes in the order in which they were added. A launch of a graph is one operation.
 *
 * A launch first occupies the device for the summed time of its kernels, fills and copies on the device. Then it takes
 * the time of its transfers with host memory, and then calls its host functions.
 */
#include "work/graph.h"

#include <stdlib.h>

#include "work/graphmemory.h"
#include "work/module.h"

struct exec {
    unsigned magic;
    struct graph *graph; /* copy of the graph, made when it was instantiated or updated */
    struct fake_footprint memory;
};

struct graph *fake_graph_new(void) {
    struct graph *graph = calloc(1, sizeof *graph);
    graph->magic = MAGIC_GRAPH;
    return graph;
}

struct node *fake_graph_add(struct graph *graph, struct node node) {
    struct node *kept = malloc(sizeof *kept);
    node.magic = MAGIC_NODE;
    node.graph = graph;
    node.next = NULL;
    *kept = node;
    if (graph->last == NULL)
        graph->first = kept;
    else
        graph->last->next = kept;
    graph->last = kept;
    graph->count++;
    return kept;
}

struct graph *fake_graph_clone(const struct graph *graph) {
    struct graph *clone = fake_graph_new();
    for (const struct node *node = graph->first; node != NULL; node = node->next) {
        struct node *added = fake_graph_add(clone, *node);
        if (node->child != NULL)
            added->child = fake_graph_clone(node->child);
    }
    return clone;
}

void fake_graph_free(struct graph *graph) {
    for (struct node *node = graph->first, *next; node != NULL; node = next) {
        next = node->next;
        if (node->child != NULL)
            fake_graph_free(node->child);
        node->magic = 0;
        free(node);
    }
    graph->magic = 0;
    free(graph);
}

EXPORT CUresult cuGraphCreate(CUgraph *out, unsigned int flags) {
    if (out == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = fake_initialized();
    if (result == CUDA_SUCCESS && flags != 0)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *out = (CUgraph)fake_graph_new();
    return result;
}

EXPORT CUresult cuGraphClone(CUgraph *out, CUgraph original) {
    if (out == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (!fake_is(original, MAGIC_GRAPH))
        return CUDA_ERROR_INVALID_VALUE;
    *out = (CUgraph)fake_graph_clone((const struct graph *)original);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphDestroy(CUgraph handle) {
    if (!fake_is(handle, MAGIC_GRAPH))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    fake_graph_free((struct graph *)handle);
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}

static CUresult instantiate(CUgraphExec *out, CUgraph handle, unsigned long long flags, CUstream upload) {
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (out == NULL || !fake_is(handle, MAGIC_GRAPH))
        return CUDA_ERROR_INVALID_VALUE;
    struct exec *exec = calloc(1, sizeof *exec);
    pthread_mutex_lock(&fake_lock);
    exec->magic = MAGIC_EXEC;
    exec->graph = fake_graph_clone((const struct graph *)handle);
    fake_footprint_of(exec->graph, &exec->memory);
    pthread_mutex_unlock(&fake_lock);
    *out = (CUgraphExec)exec;
    if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD)
        result = cuGraphUpload(*out, upload);
    if (result != CUDA_SUCCESS)
        cuGraphExecDestroy(*out);
    return result;
}

EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph handle, unsigned long long flags) {
    return flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD ? CUDA_ERROR_INVALID_VALUE
                                                      : instantiate(out, handle, flags, NULL);
}

EXPORT CUresult cuGraphInstantiateWithParams(CUgraphExec *out, CUgraph handle, CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
    if (params == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = instantiate(out, handle, params->flags, params->hUploadStream);
    params->hErrNode_out = NULL;
    params->result_out = result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
    return result;
}

EXPORT CUresult cuGraphInstantiate(CUgraphExec *out, CUgraph graph, CUgraphNode *error, char *log, size_t size) {
    if (error != NULL)
        *error = NULL;
    if (log != NULL && size > 0)
        *log = '\0';
    return cuGraphInstantiateWithFlags(out, graph, 0);
}

EXPORT CUresult cuGraphInstantiate_v2(CUgraphExec *out, CUgraph graph, CUgraphNode *error, char *log, size_t size) {
    return cuGraphInstantiate(out, graph, error, log, size);
}

EXPORT CUresult cuGraphExecDestroy(CUgraphExec handle) {
    struct exec *exec = (struct exec *)handle;
    if (!fake_is(exec, MAGIC_EXEC))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    fake_footprint_drop(&exec->memory);
    fake_graph_free(exec->graph);
    exec->magic = 0;
    free(exec);
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}

/* Update an executable graph. The new graph must have nodes of the same types in the same order; parameters may differ.
 */
static CUresult update(CUgraphExec exec_handle, CUgraph handle, CUgraphExecUpdateResult *detail) {
    struct exec *exec = (struct exec *)exec_handle;
    struct graph *graph = (struct graph *)handle;
    if (!fake_is(exec, MAGIC_EXEC) || !fake_is(graph, MAGIC_GRAPH))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    *detail =
        exec->graph->count == graph->count ? CU_GRAPH_EXEC_UPDATE_SUCCESS : CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    struct node *old = exec->graph->first, *new = graph->first;
    for (; *detail == CU_GRAPH_EXEC_UPDATE_SUCCESS && new != NULL; old = old->next, new = new->next)
        if (old->work.type != new->work.type)
            *detail = CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
        else if (old->bytes != new->bytes)
            *detail = CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED;
    if (*detail == CU_GRAPH_EXEC_UPDATE_SUCCESS) {
        fake_graph_free(exec->graph);
        exec->graph = fake_graph_clone(graph);
    }
    pthread_mutex_unlock(&fake_lock);
    return *detail == CU_GRAPH_EXEC_UPDATE_SUCCESS ? CUDA_SUCCESS : CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
}

EXPORT CUresult cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *node, CUgraphExecUpdateResult *detail) {
    CUgraphExecUpdateResult why = CU_GRAPH_EXEC_UPDATE_ERROR;
    if (node != NULL)
        *node = NULL;
    CUresult result = update(exec, graph, &why);
    if (detail != NULL)
        *detail = why;
    return result;
}

EXPORT CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *out) {
    CUgraphExecUpdateResult why = CU_GRAPH_EXEC_UPDATE_ERROR;
    CUresult result = update(exec, graph, &why);
    if (out != NULL)
        *out = (CUgraphExecUpdateResultInfo){.result = why};
    return result;
}

EXPORT CUresult cuGraphUpload(CUgraphExec handle, CUstream stream_handle) {
    struct exec *exec = (struct exec *)handle;
    struct stream *stream;
    CUresult result = fake_enter_stream(stream_handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (!fake_is(exec, MAGIC_EXEC))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    result = fake_not_captured(stream);
    if (result == CUDA_SUCCESS)
        result = fake_footprint_map(&exec->memory);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

struct sums {
    struct work on_device;
    uint64_t copy_ns;
};

static void add_up(const struct graph *graph, struct sums *sums) {
    for (const struct node *node = graph->first; node != NULL; node = node->next) {
        sums->on_device.device_ns += node->work.device_ns;
        sums->on_device.hang |= node->work.hang;
        sums->copy_ns += node->work.copy_ns;
        if (node->child != NULL)
            add_up(node->child, sums);
    }
}

static void call_hosts(const struct graph *graph, struct stream *stream) {
    for (const struct node *node = graph->first; node != NULL; node = node->next) {
        if (node->work.function != NULL)
            fake_put_work(stream, &node->work);
        if (node->child != NULL)
            call_hosts(node->child, stream);
    }
}

EXPORT CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream_handle) {
    struct exec *exec = (struct exec *)handle;
    struct stream *stream;
    CUresult result = fake_enter_stream(stream_handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (!fake_is(exec, MAGIC_EXEC))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    struct sums sums = {.on_device.type = CU_GRAPH_NODE_TYPE_KERNEL};
    add_up(exec->graph, &sums);
    if (stream->capture != NULL) { /* a child graph of the captured graph */
        struct node node = {.work.type = CU_GRAPH_NODE_TYPE_GRAPH, .child = fake_graph_clone(exec->graph)};
        result = fake_capture_node(stream, &node);
    } else {
        result = fake_order_call(stream);
        if (result == CUDA_SUCCESS)
            result = fake_footprint_map(&exec->memory);
        if (result == CUDA_SUCCESS) {
            struct work copies = {.copy_ns = sums.copy_ns};
            fake_put_work(stream, &sums.on_device);
            if (sums.copy_ns > 0)
                fake_put_work(stream, &copies);
            call_hosts(exec->graph, stream);
        }
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}
