/* Function that Python calls to learn which GPUs of a node pass the filters for a request class. */
#include "filters.h"

int64_t shp_passing(const shp_columns *columns, const shp_request *request, int64_t node, int64_t *gpus) {
    const struct bounds bounds = bounds_of(columns, request);
    return passing_gpus(columns, request, &bounds, node, gpus);
}
