/* Filters for a request class: which nodes and GPUs pass. The functions are inline, because they are the inner loop
 * of every pass over all nodes.
 *
 * Guarantees:
 * - Every place that passes placement's filters in Python also passes here. Properties that are not in the columns are
 *   not checked.
 * - The functions write only their output.
 */
#ifndef SHAREPOD_FILTERS_H
#define SHAREPOD_FILTERS_H

#include "columns.h"

/* Bounds on the columns of a GPU, for a request class: at least `milli` of the column `share` and `memory` bytes.
 * The number of its exclusion label is at most `exclusion_at_most`, or equal to `own`. */
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

/* Write the positions of the node's GPUs within the bounds to `gpus`, and return their number. `first`: index of the
 * node's first GPU in the columns. The loop has no branch for each GPU, because a processor could not predict it. */
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

/* Keep only the GPUs of `gpus` on which latency, labels and model of the request allow it. Return their number. */
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

/* Return whether a node has CPU and memory for the pod, and suits it. */
static inline bool node_passes(const shp_columns *columns, const shp_request *request, int64_t node) {
    return columns->room[2 * node] >= request->room_cpu && columns->room[2 * node + 1] >= request->room_memory &&
           (!request->node_mask || request->node_mask[node]);
}

/* Do what `shp_passing` does. `bounds`: `bounds_of` the request. */
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

enum { RANKS_BY_IDLE = 64 }; /* more than the largest result of `idle_gpus` */

/* Return the number of the node's GPUs without a tenant, at most 63. */
static inline int64_t idle_gpus(const shp_columns *columns, int64_t node) {
    int64_t idle = 0;
    for (int64_t at = node * columns->width; at < (node + 1) * columns->width; at++)
        idle += columns->signature[at] != 0 && columns->tenants[at] == 0;
    return at_most(RANKS_BY_IDLE - 1, idle);
}

#endif
