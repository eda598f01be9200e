/* Which cells of a node a request may go to.
 *
 * Guarantees: passes whatever the filters of placement pass but for what the columns do not know, and changes nothing.
 */
#include "rows.h"

/* The common case, a share of any model that nobody keeps apart, without a branch. */
static int64_t plain_cells(const shp_columns *columns, const shp_ask *ask, int64_t first, int64_t *restrict cells) {
    const int64_t *restrict label = columns->label + first;
    const int64_t *restrict free = (ask->memory < 0 ? columns->by_memory : columns->free) + first;
    const int64_t *restrict bytes = columns->bytes + first;
    const int64_t milli = ask->milli, memory = ask->memory < 0 ? INT64_MIN : ask->memory, width = columns->width;
    int64_t found = 0;
    for (int64_t cell = 0; cell < width; cell++) {
        cells[found] = cell;
        found += (free[cell] >= milli) & (bytes[cell] >= memory) & (label[cell] <= PLAIN);
    }
    return found;
}

static bool cell_passes(const shp_columns *columns, const shp_ask *ask, int64_t at) {
    int64_t label = columns->label[at];
    if (ask->blocked && ask->blocked[at])
        return false;
    if (ask->models && !ask->models[columns->model[at]])
        return false;
    if (ask->whole)
        return label == EMPTY && columns->free[at] >= 0;
    if (ask->memory < 0 ? columns->by_memory[at] < ask->milli
                        : columns->free[at] < ask->milli || columns->bytes[at] < ask->memory)
        return false;
    return ask->exclusion ? label == EMPTY || label == ask->exclusion : label <= PLAIN;
}

int64_t shp_passing(const shp_columns *columns, const shp_ask *ask, int64_t row, int64_t *cells) {
    if (columns->room[2 * row] < ask->room_cpu || columns->room[2 * row + 1] < ask->room_memory)
        return 0;
    if (ask->nodes && !ask->nodes[row])
        return 0;
    int64_t found = 0;
    int64_t first = row * columns->width;
    if (!ask->blocked && !ask->models && !ask->whole && !ask->exclusion) {
        found = plain_cells(columns, ask, first, cells);
    } else {
        for (int64_t cell = 0; cell < columns->width; cell++)
            if (cell_passes(columns, ask, first + cell))
                cells[found++] = cell;
    }
    return found >= ask->count ? found : 0;
}

bool shp_host_passes(const shp_columns *columns, const shp_ask *ask, int64_t row) {
    return columns->room[2 * row] >= ask->room_cpu && columns->room[2 * row + 1] >= ask->room_memory &&
           (!ask->nodes || ask->nodes[row]);
}
