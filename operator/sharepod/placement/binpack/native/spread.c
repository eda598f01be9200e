/* Orders of nodes that want no estimate of the demand: Spread and the first of a group, best effort.
 *
 * Guarantees: writes `score` and `cells` and nothing else, allocates nothing.
 */
#include "rows.h"

static void ascending(int64_t *costs, int64_t found) {
    for (int64_t number = 1; number < found; number++) {
        int64_t cost = costs[number], at = number;
        for (; at > 0 && costs[at - 1] > cost; at--)
            costs[at] = costs[at - 1];
        costs[at] = cost;
    }
}

void shp_most_free(const shp_columns *columns, const shp_ask *ask, int64_t *score, int64_t *cells) {
    for (int64_t row = 0; row < columns->rows; row++) {
        int64_t passing = shp_passing(columns, ask, row, cells);
        for (int64_t number = 0; number < passing; number++) {
            int64_t at = row * columns->width + cells[number];
            cells[number] = ((WHOLE_GPU - columns->time[at]) << 32) + (columns->tenants[at] << 12) + WHOLE_GPU -
                            columns->memory[at];
        }
        ascending(cells, passing);
        score[row] = passing ? -cells[ask->count - 1] : NO_PLACE;
    }
}

static int64_t idle_cells(const shp_columns *columns, int64_t row) {
    int64_t idle = 0;
    for (int64_t at = row * columns->width; at < (row + 1) * columns->width; at++)
        idle += columns->like[at] != 0 && columns->tenants[at] == 0;
    return idle;
}

void shp_least_promised(const shp_columns *columns, const shp_ask *ask, int64_t *score, int64_t *cells) {
    for (int64_t row = 0; row < columns->rows; row++) {
        int64_t passing = shp_passing(columns, ask, row, cells);
        score[row] = NO_PLACE;
        if (!passing)
            continue;
        for (int64_t number = 0; number < passing; number++) {
            int64_t at = row * columns->width + cells[number];
            cells[number] = ((int64_t)(columns->tenants[at] == 0) << 44) + ((WHOLE_GPU - columns->time[at]) << 28) +
                            (columns->tenants[at] << 12) + columns->memory[at];
        }
        ascending(cells, passing);
        int64_t cost = 0;
        for (int64_t number = 0; number < ask->count; number++)
            cost += cells[number];
        score[row] = -(cost * 64 + at_most(63, idle_cells(columns, row)));
    }
}
