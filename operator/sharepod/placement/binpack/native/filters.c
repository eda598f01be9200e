/* GPUs of a node that pass for a request class.
 *
 * Guarantees: passes whatever the filters of placement pass, but for what the columns do not know. Changes nothing.
 */
#include "columns.h"

/* The common case without a branch: a share of any model, without exclusion or anti-affinity label. */
static int64_t plain_gpus(const shp_columns *columns, const shp_request *request, int64_t first,
                          int64_t *restrict gpus) {
    const int64_t *restrict exclusion = columns->exclusion + first;
    const int64_t *restrict share = (request->memory < 0 ? columns->share_in_proportion : columns->share) + first;
    const int64_t *restrict bytes = columns->bytes + first;
    const int64_t milli = request->milli, memory = request->memory < 0 ? INT64_MIN : request->memory,
                  width = columns->width;
    int64_t found = 0;
    for (int64_t gpu = 0; gpu < width; gpu++) {
        gpus[found] = gpu;
        found += (share[gpu] >= milli) & (bytes[gpu] >= memory) & (exclusion[gpu] <= NO_EXCLUSION);
    }
    return found;
}

static bool gpu_passes(const shp_columns *columns, const shp_request *request, int64_t at) {
    int64_t exclusion = columns->exclusion[at];
    if (request->blocked_gpus && request->blocked_gpus[at])
        return false;
    if (request->model_mask && !request->model_mask[columns->model[at]])
        return false;
    if (request->whole)
        return exclusion == NO_TENANT && columns->share[at] >= 0;
    if (request->memory < 0 ? columns->share_in_proportion[at] < request->milli
                            : columns->share[at] < request->milli || columns->bytes[at] < request->memory)
        return false;
    return request->exclusion ? exclusion == NO_TENANT || exclusion == request->exclusion : exclusion <= NO_EXCLUSION;
}

int64_t shp_passing(const shp_columns *columns, const shp_request *request, int64_t node, int64_t *gpus) {
    if (columns->room[2 * node] < request->room_cpu || columns->room[2 * node + 1] < request->room_memory)
        return 0;
    if (request->node_mask && !request->node_mask[node])
        return 0;
    int64_t found = 0;
    int64_t first = node * columns->width;
    if (!request->blocked_gpus && !request->model_mask && !request->whole && !request->exclusion) {
        found = plain_gpus(columns, request, first, gpus);
    } else {
        for (int64_t gpu = 0; gpu < columns->width; gpu++)
            if (gpu_passes(columns, request, first + gpu))
                gpus[found++] = gpu;
    }
    return found >= request->count ? found : 0;
}

bool shp_node_passes(const shp_columns *columns, const shp_request *request, int64_t node) {
    return columns->room[2 * node] >= request->room_cpu && columns->room[2 * node + 1] >= request->room_memory &&
           (!request->node_mask || request->node_mask[node]);
}
