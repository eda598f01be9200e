/* Device memory that graphs allocate.
 *
 * An executable graph takes its allocation nodes' bytes, each rounded up to 2 MiB, when it is first launched or
 * uploaded, and keeps them. When it is destroyed they stay reserved for the next graph of the device until
 * cuDeviceGraphMemTrim.
 */
#include "graphmemory.h"

#include "graph.h"
#include "memory.h"

struct graph_memory {
    uint64_t reserved, reserved_high, used, used_high;
};

static struct graph_memory devices[FAKE_DEVICES];

void fake_footprint_of(const struct graph *graph, struct fake_footprint *out) {
    for (const struct node *node = graph->first; node != NULL; node = node->next) {
        if (node->work.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) {
            out->device = node->device;
            out->bytes += fake_round(node->bytes, PAGE_BYTES);
        }
        if (node->child != NULL)
            fake_footprint_of(node->child, out);
    }
}

CUresult fake_footprint_map(struct fake_footprint *footprint) {
    struct graph_memory *memory = &devices[footprint->device];
    if (footprint->mapped || footprint->bytes == 0)
        return CUDA_SUCCESS;
    uint64_t needed = memory->used + footprint->bytes;
    if (needed > memory->reserved) {
        if (!fake_state_take(footprint->device, FAKE_GRAPH, needed - memory->reserved))
            return CUDA_ERROR_OUT_OF_MEMORY;
        memory->reserved = needed;
    }
    memory->used = needed;
    if (memory->used > memory->used_high)
        memory->used_high = memory->used;
    if (memory->reserved > memory->reserved_high)
        memory->reserved_high = memory->reserved;
    footprint->mapped = true;
    return CUDA_SUCCESS;
}

void fake_footprint_drop(struct fake_footprint *footprint) {
    if (footprint->mapped)
        devices[footprint->device].used -= footprint->bytes;
    footprint->mapped = false;
}

EXPORT CUresult cuDeviceGraphMemTrim(CUdevice ordinal) {
    int device;
    pthread_mutex_lock(&fake_lock);
    CUresult result = fake_find_device(ordinal, &device);
    if (result == CUDA_SUCCESS) {
        struct graph_memory *memory = &devices[device];
        fake_state_give(device, FAKE_GRAPH, memory->reserved - memory->used);
        memory->reserved = memory->used;
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuDeviceGetGraphMemAttribute(CUdevice ordinal, CUgraphMem_attribute attribute, void *value) {
    int device;
    pthread_mutex_lock(&fake_lock);
    CUresult result = value == NULL ? CUDA_ERROR_INVALID_VALUE : fake_find_device(ordinal, &device);
    if (result == CUDA_SUCCESS) {
        const struct graph_memory *memory = &devices[device];
        switch (attribute) {
        case CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT: *(cuuint64_t *)value = memory->used; break;
        case CU_GRAPH_MEM_ATTR_USED_MEM_HIGH: *(cuuint64_t *)value = memory->used_high; break;
        case CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT: *(cuuint64_t *)value = memory->reserved; break;
        case CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH: *(cuuint64_t *)value = memory->reserved_high; break;
        default: result = CUDA_ERROR_INVALID_VALUE;
        }
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuDeviceSetGraphMemAttribute(CUdevice ordinal, CUgraphMem_attribute attribute, void *value) {
    int device;
    pthread_mutex_lock(&fake_lock);
    CUresult result = value == NULL || *(const cuuint64_t *)value != 0 ? CUDA_ERROR_INVALID_VALUE
                                                                       : fake_find_device(ordinal, &device);
    if (result == CUDA_SUCCESS && attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH)
        devices[device].used_high = devices[device].used;
    else if (result == CUDA_SUCCESS && attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH)
        devices[device].reserved_high = devices[device].reserved;
    else if (result == CUDA_SUCCESS)
        result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&fake_lock);
    return result;
}
