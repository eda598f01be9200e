/* Device memory that graphs allocate.
 *
 * An allocation node gets its addresses when it is created. After the graph has freed them, a later node of the graph
 * may get the same addresses. At its first launch or upload, an executable graph takes the 2 MiB pages that contain its
 * allocations, and keeps them. After it is destroyed, the pages stay reserved for the next graph of the device until
 * cuDeviceGraphMemTrim.
 */
#include "work/graphmemory.h"

#include <stdlib.h>

#include "work/graph.h"
#include "memory/memory.h"

struct graph_memory {
    uint64_t reserved, reserved_high, used, used_high;
};

static struct graph_memory devices[FAKE_DEVICES];

void fake_graph_place(struct graph *graph, struct node *node, uint64_t asked, struct context *context) {
    node->bytes = fake_round(asked, GRANULARITY);
    for (struct node *before = graph->first; before != NULL; before = before->next)
        if (before->freed && before->device == node->device && before->bytes >= node->bytes) {
            before->freed = false;
            node->address = before->address;
            return;
        }
    struct range range = {
        .bytes = node->bytes, .asked = asked, .kind = RANGE_GRAPH, .device = node->device, .context = context};
    node->address = fake_range_add(range, node->bytes < PAGE_BYTES ? GRANULARITY : PAGE_BYTES, 0)->address;
}

void fake_graph_frees(struct graph *graph, CUdeviceptr address) {
    struct node *newest = NULL;
    for (struct node *node = graph->first; node != NULL; node = node->next)
        if (node->work.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && node->address == address)
            newest = node;
    if (newest != NULL)
        newest->freed = true;
}

/* Get the page numbers of the graph's allocations, one entry per page and allocation. Return the number of entries.
 * `out` may be NULL. */
static size_t pages_of(const struct graph *graph, uint64_t *out, int *device) {
    size_t count = 0;
    for (const struct node *node = graph->first; node != NULL; node = node->next) {
        if (node->work.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) {
            *device = node->device;
            for (uint64_t page = node->address / PAGE_BYTES; page * PAGE_BYTES < node->address + node->bytes;
                 page++, count++)
                if (out != NULL)
                    out[count] = page;
        }
        if (node->child != NULL)
            count += pages_of(node->child, out != NULL ? out + count : NULL, device);
    }
    return count;
}

static int compare(const void *a, const void *b) {
    uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;
    return (left > right) - (left < right);
}

void fake_footprint_of(const struct graph *graph, struct fake_footprint *out) {
    size_t count = pages_of(graph, NULL, &out->device);
    uint64_t *pages = malloc(count * sizeof *pages + 1);
    pages_of(graph, pages, &out->device);
    qsort(pages, count, sizeof *pages, compare);
    for (size_t i = 0; i < count; i++)
        out->bytes += i == 0 || pages[i] != pages[i - 1] ? PAGE_BYTES : 0;
    free(pages);
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
