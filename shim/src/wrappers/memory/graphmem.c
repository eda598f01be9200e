/* Memory of graphs. Each executable graph has an allocation table entry per device, with its footprint in bytes.
 *
 * The entry itself is not charged. Before each launch its bytes are charged as growth of the graph pool. After the
 * launch, the graph pool is charged by the driver's byte count (C7, pool_memory.h).
 */
#include "wrappers/memory/graphmem.h"

#include "memory/charge.h"
#include "memory/state.h"
#include "driver/entries.h"
#include "process/process.h"
#include "memory/pools/footprint.h"
#include "time/queue/graph_times.h"

/* Return the allocation key of a graph on one device. The upper 16 bits of a handle are 0, so they hold the device. */
static uint64_t key_of(CUgraphExec exec, CUdevice device) {
    return (uintptr_t)exec ^ (uint64_t)device << 48;
}

void graphmem_expect(CUdevice device) {
    graph_pool_register(device);
}

void graphmem_instantiated(CUgraphExec exec, CUgraph graph) {
    graphmem_destroyed(exec); /* another graph may have had this handle */
    for (struct pool_memory *at = graph_pool_next(NULL); at != NULL; at = graph_pool_next(at)) {
        uint64_t bytes = footprint_of(graph, at->device);
        if (bytes == 0)
            continue;
        memory_lock();
        struct allocation *allocation = allocations_make(&memory_state()->allocations);
        if (allocation != NULL) {
            allocation->kind = ALLOCATION_GRAPH;
            allocation->key = key_of(exec, at->device);
            allocation->place = -1; /* the entry itself is not charged */
            allocation->bytes = bytes;
            allocations_add(&memory_state()->allocations, allocation);
        }
        memory_unlock();
    }
}

void graphmem_destroyed(CUgraphExec exec) {
    if (!graph_pool_any())
        return;
    for (struct pool_memory *at = graph_pool_next(NULL); at != NULL; at = graph_pool_next(at))
        uncharge_end(uncharge_begin(ALLOCATION_GRAPH, key_of(exec, at->device)), true);
}

/* Return the bytes that a launch of the graph may allocate on a device. `*reuse`: whether the graph pool has them
 * already, because the graph was launched before and the pool was not trimmed since. */
static uint64_t may_take(CUgraphExec exec, const struct pool_memory *memory, enum pool_reuse *reuse) {
    memory_lock();
    struct allocation *allocation =
        allocations_find(&memory_state()->allocations, ALLOCATION_GRAPH, key_of(exec, memory->device));
    uint64_t mark = allocation ? allocation->mark : 0, bytes = allocation ? allocation->bytes : 0;
    *reuse = mark == 0 ? REUSE_UNKNOWN : mark == memory->trims + 1ull ? REUSE_SURE : REUSE_LIKELY;
    memory_unlock();
    return bytes;
}

/* Record the pool's number of trims at this launch of the graph, for the next may_take. `launched` false: the launch
 * failed, so the graph counts as not launched. */
static void note_launch(CUgraphExec exec, const struct pool_memory *memory, bool launched) {
    memory_lock();
    struct allocation *allocation =
        allocations_find(&memory_state()->allocations, ALLOCATION_GRAPH, key_of(exec, memory->device));
    if (allocation != NULL)
        allocation->mark = launched ? memory->trims + 1ull : 0;
    memory_unlock();
}

CUresult graphmem_begin(struct graph_reservation *reservation, CUgraphExec exec) {
    enum pool_reuse reuse;
    reservation->count = 0;
    reservation->exec = exec;
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || !graph_pool_any())
        return result;
    for (struct pool_memory *at = graph_pool_next(NULL); at != NULL && reservation->count < GRAPHMEM_DEVICES;
         at = graph_pool_next(at)) {
        uint64_t bytes = may_take(exec, at, &reuse);
        if (bytes == 0)
            continue;
        if (!pool_call_begin(&reservation->calls[reservation->count], at, bytes, reuse)) {
            graphmem_end(reservation, CUDA_ERROR_OUT_OF_MEMORY);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        reservation->count++;
    }
    return CUDA_SUCCESS;
}

void graphmem_end(struct graph_reservation *reservation, CUresult result) {
    for (unsigned i = 0; i < reservation->count; i++) {
        struct pool_call *call = &reservation->calls[i];
        if (call->memory != NULL)
            note_launch(reservation->exec, call->memory, result == CUDA_SUCCESS);
        if (!pool_call_end(call))
            pool_call_close(call);
    }
    reservation->count = 0;
}

#define ADD_NODE(symbol, allocates, device, ...)                               \
    CUresult result = process_enter();                                         \
    if (result != CUDA_SUCCESS)                                                \
        return result;                                                         \
    bool allocating = (allocates);                                             \
    if (allocating)                                                            \
        graphmem_expect(device);                                               \
    result = HAS(symbol) ? DRIVER(symbol)(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND; \
    if (allocating)                                                            \
        kinds_forget(&memory_state()->kinds);                                  \
    return result

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
    if (result == CUDA_SUCCESS)                                                \
        graph_times_instantiated(&the_process->graphs, *exec, graph);          \
    if (result == CUDA_SUCCESS && graph_pool_any())                            \
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

/* Instantiate a graph. CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD would make the driver allocate memory during the call. So the
 * flag is removed, and the upload is charged and made afterwards. If the upload fails, the executable graph is
 * destroyed. */
static CUresult with_parameters(CUresult (*call)(CUgraphExec *, CUgraph, CUDA_GRAPH_INSTANTIATE_PARAMS *),
                                CUresult (*upload)(CUgraphExec, CUstream), CUgraphExec *exec, CUgraph graph,
                                CUDA_GRAPH_INSTANTIATE_PARAMS *parameters) {
    struct graph_reservation reservation;
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || call == NULL)
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    bool uploads = graph_pool_any() && exec != NULL && parameters != NULL && upload != NULL &&
                   (parameters->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) != 0;
    if (uploads)
        parameters->flags &= ~(cuuint64_t)CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD;
    result = call(exec, graph, parameters);
    if (uploads)
        parameters->flags |= CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD;
    if (result == CUDA_SUCCESS)
        graph_times_instantiated(&the_process->graphs, *exec, graph);
    if (result != CUDA_SUCCESS || !graph_pool_any())
        return result;
    graphmem_instantiated(*exec, graph);
    if (!uploads)
        return result;
    result = graphmem_begin(&reservation, *exec);
    if (result == CUDA_SUCCESS) {
        result = upload(*exec, parameters->hUploadStream);
        graphmem_end(&reservation, result);
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
    struct graph_reservation reservation;
    CUresult result = graphmem_begin(&reservation, exec);
    if (result != CUDA_SUCCESS)
        return result;
    result = call != NULL ? call(exec, stream) : CUDA_ERROR_NOT_FOUND;
    graphmem_end(&reservation, result);
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
    if (result != CUDA_SUCCESS || !graph_pool_any())
        return result;
    struct pool_memory *memory = graph_pool_register(device);
    if (memory != NULL) {
        memory_lock();
        memory->trims++;
        memory_unlock();
        pool_settle(memory);
    }
    return result;
}
