/* Filters for a request class: which nodes and GPUs pass. The functions are inline, because they are the inner loop of
 * every pass over all nodes.
 *
 * Guarantees: every place that passes placement's filters also passes here. Properties that are not in the columns are
 * not checked. The functions change nothing.
 */
#ifndef SHAREPOD_FILTERS_H
#define SHAREPOD_FILTERS_H

#include "columns.h"

/* Bounds on a GPU's columns for a request class. `exclusion_at_most` bounds the number of its exclusion label; the
 * label `own` also passes. */
struct bounds {
    const int64_t *share;
    int64_t milli;
    int64_t memory;
    int64_t exclusion_at_most;
    int64_t own;
};

static inline struct bounds bounds_of(const shp_columns *columns, const shp_request *request) {
    struct bounds bounds = {.share = columns->share,
                            .milli = request->milli,
                            .memory = request->memory,
                            .exclusion_at_most = request->exclusion ? NO_TENANT : NO_EXCLUSION,
                            .own = request->exclusion ? request->exclusion : NO_TENANT};
    if (request->whole)
        bounds.milli = 0, bounds.exclusion_at_most = bounds.own = NO_TENANT;
    else if (request->memory < 0)
        bounds.share = columns->share_in_proportion;
    if (request->whole || request->memory < 0)
        bounds.memory = INT64_MIN;
    return bounds;
}

/* Return the GPUs within the bounds. The loop has no branch for each GPU, because its outcome is unpredictable. */
static inline int64_t within_bounds(const shp_columns *columns, const struct bounds *bounds, int64_t first,
                                    int64_t *restrict gpus) {
    const int64_t *restrict share = bounds->share + first, *restrict bytes = columns->bytes + first,
                            *restrict exclusion = columns->exclusion + first;
    const int64_t width = columns->width;
    int64_t found = 0;
    for (int64_t gpu = 0; gpu < width; gpu++) {
        gpus[found] = gpu;
        found += (share[gpu] >= bounds->milli) & (bytes[gpu] >= bounds->memory) &
                 ((exclusion[gpu] <= bounds->exclusion_at_most) | (exclusion[gpu] == bounds->own));
    }
    return found;
}

/* Keep the GPUs that the masks allow. */
static inline int64_t left_by_masks(const shp_columns *columns, const shp_request *request, int64_t first,
                                    int64_t *gpus, int64_t found) {
    int64_t left = 0;
    for (int64_t number = 0; number < found; number++) {
        int64_t at = first + gpus[number];
        gpus[left] = gpus[number];
        left += (!request->interactive || columns->interactive_room[at]) &&
                (!request->keeps_off || !request->keeps_off[columns->labels[at]]) &&
                (!request->model_mask || request->model_mask[columns->model[at]]);
    }
    return left;
}

/* Return whether a node takes a pod without GPUs. */
static inline bool node_passes(const shp_columns *columns, const shp_request *request, int64_t node) {
    return columns->room[2 * node] >= request->room_cpu && columns->room[2 * node + 1] >= request->room_memory &&
           (!request->node_mask || request->node_mask[node]);
}

/* As `shp_passing`, by the bounds of the request. */
static inline int64_t passing_gpus(const shp_columns *columns, const shp_request *request, const struct bounds *bounds,
                                   int64_t node, int64_t *gpus) {
    if (!node_passes(columns, request, node))
        return 0;
    int64_t first = node * columns->width;
    int64_t found = within_bounds(columns, bounds, first, gpus);
    if (found && (request->interactive || request->keeps_off || request->model_mask))
        found = left_by_masks(columns, request, first, gpus, found);
    return found >= request->count ? found : 0;
}

enum { RANKS_BY_IDLE = 64 }; /* more than `idle_gpus` returns */

/* Return the number of the node's GPUs without a tenant, at most 63. */
static inline int64_t idle_gpus(const shp_columns *columns, int64_t node) {
    int64_t idle = 0;
    for (int64_t at = node * columns->width; at < (node + 1) * columns->width; at++)
        idle += columns->signature[at] != 0 && columns->tenants[at] == 0;
    return at_most(RANKS_BY_IDLE - 1, idle);
}

#endif
