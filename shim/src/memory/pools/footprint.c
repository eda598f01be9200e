/* Footprint of a graph: the allocations' page ranges are sorted by their start, and the size of their union is summed
 * up.
 */
#include "memory/pools/footprint.h"

#include <stddef.h>

#include "base/rows.h"
#include "base/sys.h"
#include "driver/entries.h"
#include "memory/state.h"

enum { DEPTH_MOST = 16 }; /* levels of child graphs that are examined */
#define PAGE (2ull << 20) /* bytes: graph memory is reserved in pages of 2 MiB */

/* Range of whole pages: from `from` up to, but not including, `to`. */
struct span {
    uint64_t from, to;
};

struct spans {
    struct rows rows;
    uint64_t unplaced; /* bytes of allocations without an address, or for which `rows` had no room */
};

static struct span *span_at(const struct spans *spans, size_t index) {
    return (struct span *)spans->rows.rows + index;
}

static void add(struct spans *spans, uint64_t address, uint64_t bytes) {
    uint64_t from = address & ~(PAGE - 1), to = memory_rounded(address + bytes, PAGE);
    if (address == 0 || to <= from || !rows_room(&spans->rows, sizeof(struct span)))
        spans->unplaced += memory_rounded(bytes, PAGE);
    else
        *span_at(spans, spans->rows.count++) = (struct span){from, to};
}

/* Add the allocations of the graph and its child graphs on this device to the spans. */
static void collect(struct spans *spans, CUgraph graph, CUdevice device, int depth) {
    size_t count = 0;
    if (depth > DEPTH_MOST || DRIVER(cuGraphGetNodes)(graph, NULL, &count) != CUDA_SUCCESS || count == 0)
        return;
    size_t size = count * sizeof(CUgraphNode);
    CUgraphNode *nodes = sys_map(size);
    if (nodes != NULL && DRIVER(cuGraphGetNodes)(graph, nodes, &count) != CUDA_SUCCESS)
        count = 0;
    for (size_t i = 0; nodes != NULL && i < count; i++) {
        CUgraphNodeType type;
        CUDA_MEM_ALLOC_NODE_PARAMS parameters;
        CUgraph child;
        if (DRIVER(cuGraphNodeGetType)(nodes[i], &type) != CUDA_SUCCESS)
            continue;
        if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC &&
            DRIVER(cuGraphMemAllocNodeGetParams)(nodes[i], &parameters) == CUDA_SUCCESS &&
            parameters.poolProps.location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
            parameters.poolProps.location.id == device)
            add(spans, parameters.dptr, parameters.bytesize);
        else if (type == CU_GRAPH_NODE_TYPE_GRAPH && HAS(cuGraphChildGraphNodeGetGraph) &&
                 DRIVER(cuGraphChildGraphNodeGetGraph)(nodes[i], &child) == CUDA_SUCCESS)
            collect(spans, child, device, depth + 1);
    }
    sys_unmap(nodes, size);
}

/* Move the span at `root` down to its place in the heap of the first `count` spans. */
static void sink(const struct spans *spans, size_t root, size_t count) {
    struct span span = *span_at(spans, root);
    for (size_t child; (child = 2 * root + 1) < count; root = child) {
        if (child + 1 < count && span_at(spans, child + 1)->from > span_at(spans, child)->from)
            child++;
        if (span_at(spans, child)->from <= span.from)
            break;
        *span_at(spans, root) = *span_at(spans, child);
    }
    *span_at(spans, root) = span;
}

/* Sort the spans by their start (heap sort: in place, O(n log n)). */
static void sort(const struct spans *spans) {
    size_t count = spans->rows.count;
    for (size_t root = count / 2; root > 0; root--)
        sink(spans, root - 1, count);
    for (size_t last = count; last > 1; last--) {
        struct span largest = *span_at(spans, 0);
        *span_at(spans, 0) = *span_at(spans, last - 1);
        *span_at(spans, last - 1) = largest;
        sink(spans, 0, last - 1);
    }
}

uint64_t footprint_of(CUgraph graph, CUdevice device) {
    struct spans spans = {0};
    if (!HAS(cuGraphGetNodes) || !HAS(cuGraphNodeGetType) || !HAS(cuGraphMemAllocNodeGetParams))
        return 0;
    collect(&spans, graph, device, 0);
    sort(&spans);
    uint64_t sum = spans.unplaced, end = 0;
    for (unsigned i = 0; i < spans.rows.count; i++) {
        const struct span *span = span_at(&spans, i);
        if (span->to > end) {
            sum += span->to - (span->from > end ? span->from : end);
            end = span->to;
        }
    }
    sys_unmap(spans.rows.rows, spans.rows.capacity * sizeof(struct span));
    return sum;
}
