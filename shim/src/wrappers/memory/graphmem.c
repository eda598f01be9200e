/* See graphmem.h. */
#include "wrappers/memory/graphmem.h"

#include "memory/charge.h"
#include "memory/lock.h"
#include "driver/entries.h"
#include "process/process.h"
#include "memory/footprint.h"

/* Under which key the part of a graph on one device is held. No handle has anything in its upper bits. */
static uint64_t key_of(CUgraphExec exec, CUdevice device) {
    return (uintptr_t)exec ^ (uint64_t)device << 48;
}

void graphmem_expect(CUdevice device) {
    growing_graphs(device);
}

void graphmem_instantiated(CUgraphExec exec, CUgraph graph) {
    graphmem_destroyed(exec); /* another graph may have had that handle */
    for (struct growing *at = growing_next_graphs(NULL); at != NULL; at = growing_next_graphs(at)) {
        uint64_t bytes = footprint_of(graph, at->device);
        if (bytes == 0)
            continue;
        books_lock();
        struct holding *holding = holdings_make(&books()->holdings);
        if (holding != NULL) {
            holding->kind = HOLDING_GRAPH;
            holding->key = key_of(exec, at->device);
            holding->place = -1; /* the bytes are no credits: they are reserved with each launch */
            holding->bytes = bytes;
            holdings_add(&books()->holdings, holding);
        }
        books_unlock();
    }
}

void graphmem_destroyed(CUgraphExec exec) {
    if (!growing_any_graphs())
        return;
    for (struct growing *at = growing_next_graphs(NULL); at != NULL; at = growing_next_graphs(at))
        uncharge_end(uncharge_begin(HOLDING_GRAPH, key_of(exec, at->device)), true);
}

/* What the graph may take on a device, and whether it has it already: surely if it was launched and nothing was trimmed
 * since. */
static uint64_t may_take(CUgraphExec exec, const struct growing *growing, enum growing_reuse *reuse) {
    books_lock();
    struct holding *holding = holdings_find(&books()->holdings, HOLDING_GRAPH, key_of(exec, growing->device));
    uint64_t mark = holding ? holding->mark : 0, bytes = holding ? holding->bytes : 0;
    *reuse = mark == 0 ? REUSE_UNKNOWN : mark == growing->trims + 1ull ? REUSE_SURE : REUSE_LIKELY;
    books_unlock();
    return bytes;
}

static void note_launch(CUgraphExec exec, const struct growing *growing, bool launched) {
    books_lock();
    struct holding *holding = holdings_find(&books()->holdings, HOLDING_GRAPH, key_of(exec, growing->device));
    if (holding != NULL)
        holding->mark = launched ? growing->trims + 1ull : 0;
    books_unlock();
}

CUresult graphmem_begin(struct graphmem *passing, CUgraphExec exec) {
    enum growing_reuse reuse;
    passing->count = 0;
    passing->exec = exec;
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || !growing_any_graphs())
        return result;
    for (struct growing *at = growing_next_graphs(NULL); at != NULL && passing->count < GRAPHMEM_DEVICES;
         at = growing_next_graphs(at)) {
        uint64_t bytes = may_take(exec, at, &reuse);
        if (bytes == 0)
            continue;
        if (!growing_begin(&passing->growths[passing->count], at, bytes, reuse)) {
            graphmem_end(passing, CUDA_ERROR_OUT_OF_MEMORY);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        passing->count++;
    }
    return CUDA_SUCCESS;
}

void graphmem_end(struct graphmem *passing, CUresult result) {
    for (unsigned i = 0; i < passing->count; i++) {
        struct growth *growth = &passing->growths[i];
        if (growth->growing != NULL)
            note_launch(passing->exec, growth->growing, result == CUDA_SUCCESS);
        if (!growing_end(growth))
            growing_close(growth);
    }
    passing->count = 0;
}

#define ADD_NODE(symbol, allocates, device, ...)                                    \
    CUresult result = process_enter();                                              \
    if (result != CUDA_SUCCESS)                                                     \
        return result;                                                              \
    if (allocates)                                                                  \
        graphmem_expect(device);                                                    \
    return HAS(symbol) ? DRIVER(symbol)(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND

EXPORT CUresult cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count,
                                       CUDA_MEM_ALLOC_NODE_PARAMS *parameters) {
    ADD_NODE(cuGraphAddMemAllocNode, parameters != NULL, parameters->poolProps.location.id, node, graph, after, count,
             parameters);
}

EXPORT CUresult cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count,
                               CUgraphNodeParams *parameters) {
    ADD_NODE(cuGraphAddNode, parameters != NULL && parameters->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC,
             parameters->alloc.poolProps.location.id, node, graph, after, count, parameters);
}

EXPORT CUresult cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *after,
                                  const CUgraphEdgeData *edges, size_t count, CUgraphNodeParams *parameters) {
    ADD_NODE(cuGraphAddNode_v2, parameters != NULL && parameters->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC,
             parameters->alloc.poolProps.location.id, node, graph, after, edges, count, parameters);
}

EXPORT CUresult cuGraphAddNode_v3(CUgraphNode *node, CUgraph graph, const CUgraphNode *after,
                                  const CUgraphEdgeData *edges, size_t count, CUgraphNodeParams *parameters) {
    ADD_NODE(cuGraphAddNode_v3, parameters != NULL && parameters->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC,
             parameters->alloc.poolProps.location.id, node, graph, after, edges, count, parameters);
}

#define INSTANTIATE(symbol, ...)                                               \
    CUresult result = process_enter();                                         \
    if (result != CUDA_SUCCESS)                                                \
        return result;                                                         \
    result = HAS(symbol) ? DRIVER(symbol)(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND; \
    if (result == CUDA_SUCCESS && growing_any_graphs())                        \
        graphmem_instantiated(*exec, graph);                                   \
    return result

EXPORT CUresult cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *node, char *log, size_t size) {
    INSTANTIATE(cuGraphInstantiate, exec, graph, node, log, size);
}

EXPORT CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *node, char *log, size_t size) {
    INSTANTIATE(cuGraphInstantiate_v2, exec, graph, node, log, size);
}

EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    INSTANTIATE(cuGraphInstantiateWithFlags, exec, graph, flags);
}

/* With CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD it takes memory at once: the flag is taken out and the upload made after. */
static CUresult with_parameters(CUresult (*call)(CUgraphExec *, CUgraph, CUDA_GRAPH_INSTANTIATE_PARAMS *),
                                CUresult (*upload)(CUgraphExec, CUstream), CUgraphExec *exec, CUgraph graph,
                                CUDA_GRAPH_INSTANTIATE_PARAMS *parameters) {
    struct graphmem passing;
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || call == NULL)
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    bool uploads = growing_any_graphs() && exec != NULL && parameters != NULL && upload != NULL &&
                   (parameters->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) != 0;
    if (uploads)
        parameters->flags &= ~(cuuint64_t)CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD;
    result = call(exec, graph, parameters);
    if (uploads)
        parameters->flags |= CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD;
    if (result != CUDA_SUCCESS || !growing_any_graphs())
        return result;
    graphmem_instantiated(*exec, graph);
    if (!uploads)
        return result;
    result = graphmem_begin(&passing, *exec);
    if (result == CUDA_SUCCESS) {
        result = upload(*exec, parameters->hUploadStream);
        graphmem_end(&passing, result);
    }
    if (result != CUDA_SUCCESS) {
        graphmem_destroyed(*exec);
        DRIVER(cuGraphExecDestroy)(*exec);
    }
    return result;
}

EXPORT CUresult cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph,
                                             CUDA_GRAPH_INSTANTIATE_PARAMS *parameters) {
    return with_parameters(DRIVER(cuGraphInstantiateWithParams), DRIVER(cuGraphUpload), exec, graph, parameters);
}

EXPORT CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *exec, CUgraph graph,
                                                  CUDA_GRAPH_INSTANTIATE_PARAMS *parameters) {
    return with_parameters(DRIVER(cuGraphInstantiateWithParams_ptsz), DRIVER(cuGraphUpload_ptsz), exec, graph,
                           parameters);
}

static CUresult upload(CUresult (*call)(CUgraphExec, CUstream), CUgraphExec exec, CUstream stream) {
    struct graphmem passing;
    CUresult result = graphmem_begin(&passing, exec);
    if (result != CUDA_SUCCESS)
        return result;
    result = call != NULL ? call(exec, stream) : CUDA_ERROR_NOT_FOUND;
    graphmem_end(&passing, result);
    return result;
}

EXPORT CUresult cuGraphUpload(CUgraphExec exec, CUstream stream) {
    return upload(DRIVER(cuGraphUpload), exec, stream);
}

EXPORT CUresult cuGraphUpload_ptsz(CUgraphExec exec, CUstream stream) {
    return upload(DRIVER(cuGraphUpload_ptsz), exec, stream);
}

EXPORT CUresult cuDeviceGraphMemTrim(CUdevice device) {
    CUresult result = process_enter();
    if (result == CUDA_SUCCESS)
        result = HAS(cuDeviceGraphMemTrim) ? DRIVER(cuDeviceGraphMemTrim)(device) : CUDA_ERROR_NOT_FOUND;
    if (result != CUDA_SUCCESS || !growing_any_graphs())
        return result;
    struct growing *growing = growing_graphs(device);
    if (growing != NULL) {
        books_lock();
        growing->trims++;
        books_unlock();
        growing_settle(growing);
    }
    return result;
}
