/* Scores of nodes for one kind of request: the inner loops of Binpack, Spread and best effort.
 *
 * Guarantees: writes what scores.h says and nothing else, allocates nothing, and gives the same answer on every machine
 * (sums are made in a fixed order). It ranks: what it offers is asked of the filters themselves before it is taken.
 */
#include "scores.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

static const int64_t NO_PLACE = INT64_MIN;
static const int64_t WHOLE_GPU = 1000;

enum { EMPTY = 0, PLAIN = 1 }; /* labels of cells, as in columns.py */
enum { LANES = 8 };            /* parts that a sum is made in, whatever the processor */
enum { MEMO = 512 };           /* rows of equal state that are scored once; a power of two */

/* A value of a state that was scored in this call. `tag` 0: nothing yet. */
struct known {
    uint64_t tag;
    int64_t score;
    int64_t cell;
};

/* What a node would hold: copies of each kind by its GPUs and by its CPU, and the time where each kind fits. */
struct state {
    float *fits;
    float *suited;
    float *by_cpu;
    float loss;
};

static int64_t at_least(int64_t least, int64_t value) { return value > least ? value : least; }

static int64_t at_most(int64_t most, int64_t value) { return value < most ? value : most; }

/* --- Filters ------------------------------------------------------------------------------------------------- */

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
    for (int64_t cell = 0; cell < columns->width; cell++)
        if (cell_passes(columns, ask, first + cell))
            cells[found++] = cell;
    return found >= ask->count ? found : 0;
}

/* Whether a pod that takes no GPU passes. */
static bool host_passes(const shp_columns *columns, const shp_ask *ask, int64_t row) {
    return columns->room[2 * row] >= ask->room_cpu && columns->room[2 * row + 1] >= ask->room_memory &&
           (!ask->nodes || ask->nodes[row]);
}

/* --- Usable capacity ----------------------------------------------------------------------------------------- */

/* Adds `sign` times what a cell with this much free holds. */
static void add_cell(struct state *to, const shp_capacity *capacity, int64_t time, int64_t memory, int64_t size,
                     float sign) {
    int64_t kinds = capacity->kinds;
    float *restrict fits = to->fits;
    float *restrict suited = to->suited;
    if (!capacity->memory_fits) {
        const float *restrict held = capacity->in_proportion + at_most(time, memory) * (2 * kinds + 1);
        for (int64_t kind = 0; kind < kinds; kind++) {
            fits[kind] += sign * held[kind];
            suited[kind] += sign * held[kinds + kind];
        }
        to->loss += sign * held[2 * kinds];
        return;
    }
    if (size >= capacity->sizes)
        size = 0; /* first seen after the weights were made: as the first one, until they are renewed */
    const float *restrict by_time = capacity->time_fits + time * kinds;
    const float *restrict by_memory = capacity->memory_fits + (size * (WHOLE_GPU + 1) + memory) * kinds;
    const float *restrict parts = capacity->parts;
    float worth = capacity->mix * (float)time;
    for (int64_t kind = 0; kind < kinds; kind++) {
        float fit = by_time[kind] < by_memory[kind] ? by_time[kind] : by_memory[kind];
        fits[kind] += sign * (fit * parts[kind]);
        suited[kind] += sign * (fit >= 1.0F ? worth : 0.0F);
    }
    to->loss += sign * capacity->gap_loss[time];
}

static void copies_by_cpu(float *restrict copies, const shp_capacity *capacity, float cpu) {
    if (cpu < 0.0F)
        cpu = 0.0F;
    for (int64_t kind = 0; kind < capacity->kinds; kind++)
        copies[kind] = cpu / capacity->cpu[kind];
}

static float worth_of(const shp_capacity *capacity, const struct state *state, int64_t model, int64_t kind) {
    const float *weights = capacity->weights + model * capacity->kinds;
    float copies = state->by_cpu[kind] < state->fits[kind] ? state->by_cpu[kind] : state->fits[kind];
    copies = (float)(int32_t)copies;
    return weights[kind] * ((copies >= 1.0F ? state->suited[kind] : 0.0F) + copies * capacity->by_copies[kind]);
}

/* Usable capacity of a node in this state. */
static float value_of(const shp_capacity *capacity, const struct state *state, int64_t model) {
    const float *restrict weights = capacity->weights + model * capacity->kinds;
    const float *restrict by_copies = capacity->by_copies;
    const float *restrict fits = state->fits;
    const float *restrict suited = state->suited;
    const float *restrict by_cpu = state->by_cpu;
    float sums[LANES] = {0};
    int64_t kind = 0;
    for (; kind + LANES <= capacity->kinds; kind += LANES) {
        for (int lane = 0; lane < LANES; lane++) {
            int64_t at = kind + lane;
            float copies = by_cpu[at] < fits[at] ? by_cpu[at] : fits[at];
            copies = (float)(int32_t)copies;
            float share = copies >= 1.0F ? suited[at] : 0.0F;
            sums[lane] += weights[at] * (share + copies * by_copies[at]);
        }
    }
    for (int lane = 0; kind < capacity->kinds; kind++, lane++)
        sums[lane] += worth_of(capacity, state, model, kind);
    float total = 0.0F;
    for (int lane = 0; lane < LANES; lane++)
        total += sums[lane];
    return total;
}

static int64_t known_model(const shp_columns *columns, const shp_capacity *capacity, int64_t row) {
    return at_most(capacity->models, columns->node_model[row]);
}

static struct state state_in(float *scratch, int64_t kinds) {
    return (struct state){.fits = scratch, .suited = scratch + kinds, .by_cpu = scratch + 2 * kinds, .loss = 0.0F};
}

void shp_hold(const shp_columns *columns, const shp_capacity *capacity, const int64_t *rows, int64_t count,
              float *scratch) {
    int64_t kinds = capacity->kinds;
    for (int64_t number = 0; number < count; number++) {
        int64_t row = rows[number];
        float *held = capacity->held + row * (2 * kinds + 1);
        struct state state = {.fits = held, .suited = held + kinds, .by_cpu = scratch, .loss = 0.0F};
        memset(held, 0, (size_t)(2 * kinds + 1) * sizeof *held);
        for (int64_t at = row * columns->width; at < (row + 1) * columns->width; at++)
            add_cell(&state, capacity, columns->time[at], columns->memory[at], columns->size[at], 1.0F);
        held[2 * kinds] = state.loss;
        copies_by_cpu(state.by_cpu, capacity, columns->cpu[row]);
        capacity->value[row] = value_of(capacity, &state, known_model(columns, capacity, row));
    }
}

/* --- Binpack ------------------------------------------------------------------------------------------------- */

static void start_from(struct state *state, const shp_capacity *capacity, int64_t row) {
    int64_t kinds = capacity->kinds;
    const float *held = capacity->held + row * (2 * kinds + 1);
    memcpy(state->fits, held, (size_t)(2 * kinds) * sizeof *held); /* fits and suited, which lie side by side */
    state->loss = 0.0F;
}

/* Puts the request on a cell. */
static void put(struct state *state, const shp_columns *columns, const shp_capacity *capacity, const shp_ask *ask,
                int64_t at) {
    int64_t time = columns->time[at], memory = columns->memory[at], size = columns->size[at];
    int64_t takes = ask->takes[size];
    add_cell(state, capacity, at_least(0, time - ask->milli), at_least(0, memory - takes), size, 1.0F);
    add_cell(state, capacity, time, memory, size, -1.0F);
}

static float gain(const shp_columns *columns, const shp_capacity *capacity, const struct state *state, int64_t row) {
    float after = value_of(capacity, state, known_model(columns, capacity, row));
    return after - capacity->value[row] - state->loss * capacity->gap_weight;
}

static int64_t rounded(const shp_capacity *capacity, float raw) {
    return (int64_t)rintf(raw / capacity->round_to);
}

/* The best single cell of those that pass. Cells that are alike are tried once. */
static struct known best_cell(const shp_columns *columns, const shp_capacity *capacity, const shp_ask *ask, int64_t row,
                              struct state *state, const int64_t *cells, int64_t passing) {
    const int64_t *like = columns->like + row * columns->width;
    struct known best = {0};
    float highest = 0.0F;
    bool found = false;
    for (int64_t number = 0; number < passing; number++) {
        bool tried = false;
        for (int64_t before = 0; before < number && !tried; before++)
            tried = like[cells[before]] == like[cells[number]];
        if (tried)
            continue;
        start_from(state, capacity, row);
        put(state, columns, capacity, ask, row * columns->width + cells[number]);
        float raw = gain(columns, capacity, state, row);
        if (!found || raw > highest) {
            highest = raw;
            best.cell = like[cells[number]];
            found = true;
        }
    }
    best.score = rounded(capacity, highest);
    return best;
}

/* The first `count` of the cells are then the tightest, in order. */
static void tightest_first(const int64_t *time, int64_t *cells, int64_t passing, int64_t count) {
    for (int64_t place = 0; place < count; place++) {
        int64_t tightest = place;
        for (int64_t other = place + 1; other < passing; other++)
            if (time[cells[other]] < time[cells[tightest]])
                tightest = other;
        int64_t cell = cells[tightest];
        memmove(cells + place + 1, cells + place, (size_t)(tightest - place) * sizeof *cells);
        cells[place] = cell;
    }
}

static struct known score_row(const shp_columns *columns, const shp_capacity *capacity, const shp_ask *ask, int64_t row,
                              struct state *state, int64_t *cells, int64_t passing) {
    copies_by_cpu(state->by_cpu, capacity, columns->cpu[row] - ask->cpu);
    if (ask->count == 1)
        return best_cell(columns, capacity, ask, row, state, cells, passing);
    start_from(state, capacity, row);
    tightest_first(columns->time + row * columns->width, cells, passing, ask->count);
    for (int64_t number = 0; number < ask->count; number++)
        put(state, columns, capacity, ask, row * columns->width + cells[number]);
    return (struct known){.score = rounded(capacity, gain(columns, capacity, state, row))};
}

/* Equal for rows of equal state of which as many cells pass; never 0. */
static uint64_t tag_of(const shp_columns *columns, int64_t row, int64_t passing) {
    uint64_t state = (uint64_t)columns->state[row] ^ ((uint64_t)passing << 56);
    state *= UINT64_C(0x9e3779b97f4a7c15);
    return (state ^ (state >> 32)) | 1;
}

int64_t shp_score(const shp_columns *columns, const shp_capacity *capacity, const shp_ask *ask, int64_t seen,
                  int64_t *score, int64_t *cell, float *scratch, int64_t *cells) {
    struct known memo[MEMO];
    struct state state = state_in(scratch, capacity->kinds);
    int64_t scored = 0, rows_with_room = 0;
    for (int64_t row = 0; row < columns->rows; row++) {
        if (columns->stamp[row] <= seen)
            continue;
        score[row] = NO_PLACE;
        int64_t passing = 0;
        if (ask->count ? !(passing = shp_passing(columns, ask, row, cells)) : !host_passes(columns, ask, row))
            continue;
        if (!rows_with_room++)
            memset(memo, 0, sizeof memo);
        uint64_t tag = tag_of(columns, row, passing);
        struct known *known = &memo[(tag >> 1) % MEMO];
        if (known->tag != tag) {
            *known = score_row(columns, capacity, ask, row, &state, cells, passing);
            known->tag = tag;
            scored++;
        }
        score[row] = known->score;
        cell[row] = known->cell;
        if (ask->blocked)
            known->tag = 0; /* which cells are blocked is no part of the state */
    }
    return scored;
}

/* --- Spread, the first of a group, best effort ------------------------------------------------------------------ */

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

int64_t shp_best(const int64_t *score, int64_t rows) {
    int64_t best = -1, highest = NO_PLACE;
    for (int64_t row = 0; row < rows; row++) {
        if (score[row] > highest) {
            highest = score[row];
            best = row;
        }
    }
    return best;
}
