/* Scores without an estimate of the demand. `shp_most_free` is for Spread and for the first member of a group,
 * `shp_least_promised` for best effort.
 *
 * Guarantees: writes `score` and `gpus` and nothing else. Allocates nothing.
 */
#include "filters.h"

/* Sort the costs so that the first `count` are the lowest, in order. `found`: number of costs. */
static void lowest_first(int64_t *costs, int64_t found, int64_t count) {
    for (int64_t place = 0; place < count; place++) {
        int64_t lowest = place;
        for (int64_t other = place + 1; other < found; other++)
            lowest = costs[other] < costs[lowest] ? other : lowest;
        int64_t cost = costs[lowest];
        costs[lowest] = costs[place];
        costs[place] = cost;
    }
}

void shp_most_free(const shp_columns *columns, const shp_request *request, int64_t *score, int64_t *gpus) {
    const struct bounds bounds = bounds_of(columns, request);
    for (int64_t node = 0; node < columns->nodes; node++) {
        int64_t passing = passing_gpus(columns, request, &bounds, node, gpus);
        for (int64_t number = 0; number < passing; number++) {
            int64_t at = node * columns->width + gpus[number];
            gpus[number] = ((WHOLE_GPU - columns->time[at]) << 32) + (columns->tenants[at] << 12) + WHOLE_GPU -
                           columns->memory[at];
        }
        lowest_first(gpus, passing, at_most(passing, request->count));
        score[node] = passing ? -gpus[request->count - 1] : NO_PLACE;
    }
}

void shp_least_promised(const shp_columns *columns, const shp_request *request, int64_t *score, int64_t *gpus) {
    const struct bounds bounds = bounds_of(columns, request);
    for (int64_t node = 0; node < columns->nodes; node++) {
        int64_t passing = passing_gpus(columns, request, &bounds, node, gpus);
        score[node] = NO_PLACE;
        if (!passing)
            continue;
        for (int64_t number = 0; number < passing; number++) {
            int64_t at = node * columns->width + gpus[number];
            gpus[number] = ((int64_t)(columns->tenants[at] == 0) << 44) + ((WHOLE_GPU - columns->time[at]) << 28) +
                           (columns->tenants[at] << 12) + columns->memory[at];
        }
        lowest_first(gpus, passing, at_most(passing, request->count));
        int64_t cost = 0;
        for (int64_t number = 0; number < request->count; number++)
            cost += gpus[number];
        score[node] = -(cost * RANKS_BY_IDLE + idle_gpus(columns, node));
    }
}
