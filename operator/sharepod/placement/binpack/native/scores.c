/* Scores of nodes for one kind of request: the inner loops of Binpack.
 *
 * Guarantees: writes what scores.h says and nothing else, allocates nothing, and gives the same answer on every machine
 * (sums are made in a fixed order). It ranks: what it offers is asked of the filters themselves before it is taken.
 */
#include "rows.h"

#include <math.h>
#include <string.h>

/* Where the loader can choose, wider vectors are used where the processor has them. They change no sum: its parts are
 * the lanes below. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define VECTORS __attribute__((target_clones("avx2", "default")))
#else
#define VECTORS
#endif

enum { LANES = 8 };  /* parts that a sum is made in, whatever the processor; kinds are a multiple of it */
enum { MEMO = 512 }; /* rows of equal state that are scored once; a power of two */

/* A value of a state that was scored in this call. `tag` 0: nothing yet. */
struct known {
    uint64_t tag;
    int64_t score;
    int64_t cell;
    int64_t tried;
};

/* What a node would hold: copies of each kind by its GPUs and by its CPU, the time where each kind fits, and what its
 * holes are worth. */
struct state {
    float *fits;
    float *suited;
    float *by_cpu;
    float holes;
};

static int64_t at_least(int64_t least, int64_t value) {
    return value > least ? value : least;
}

/* Eight kinds at once; memory that holds some need not be aligned. */
typedef float floats __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t masks __attribute__((vector_size(32)));

static inline floats load(const float *from) {
    return *(const floats *)from;
}

static inline floats all_of(float value) {
    return value + (floats){0};
}

static inline floats where(masks holds, floats value) {
    return (floats)((masks)value & holds);
}

static inline floats lesser(floats one, floats other) {
    masks less = one < other;
    return (floats)(((masks)one & less) | ((masks)other & ~less));
}

/* Of what is not negative. */
static inline floats whole_part(floats value) {
    return __builtin_convertvector(__builtin_convertvector(value, masks), floats);
}

static inline float total_of(floats sums) {
    float total = 0.0F;
    for (int lane = 0; lane < LANES; lane++)
        total += sums[lane];
    return total;
}

/* --- Usable capacity ----------------------------------------------------------------------------------------- */

/* Of one cell: what is free of it, what its time counts where a kind fits, and what it is worth as a hole. */
struct cell {
    float time;
    float memory;
    const float *per_memory;
    float worth;
    float hole;
};

/* How many fit into so many thousandths. Halves keep a quotient of whole numbers off the next one: it is exact. */
static inline floats fitting(floats thousandths, const float *per_thousandth) {
    return whole_part(thousandths * load(per_thousandth));
}

static inline floats and_a_half(float thousandths) {
    return all_of(thousandths + 0.5F);
}

static float hole_of(const shp_capacity *capacity, int64_t time, int64_t memory, int64_t size) {
    float by_time = capacity->hole_worth[time];
    return capacity->hole_memory ? fminf(by_time, capacity->hole_memory[size * (WHOLE_GPU + 1) + memory]) : by_time;
}

static struct cell cell_with(const shp_capacity *capacity, int64_t time, int64_t memory, int64_t size) {
    if (!capacity->per_memory) /* all of it is in proportion: the smaller of the two says all */
        time = memory = at_most(time, memory);
    if (size >= capacity->sizes)
        size = 0; /* first seen after the weights were made: as the first one, until they are renewed */
    return (struct cell){.time = (float)time,
                         .memory = (float)memory,
                         .per_memory = capacity->per_memory ? capacity->per_memory + size * capacity->kinds : 0,
                         .worth = capacity->mix * (float)time,
                         .hole = hole_of(capacity, time, memory, size)};
}

/* Adds `sign` times what a cell holds. */
VECTORS static void add_cell(struct state *to, const shp_capacity *capacity, struct cell cell, float sign) {
    const float *per_time = capacity->per_time;
    const float *per_memory = cell.per_memory ? cell.per_memory : per_time;
    const floats time = and_a_half(cell.time), memory = and_a_half(cell.memory), worth = all_of(cell.worth);
    for (int64_t at = 0; at < capacity->kinds; at += LANES) {
        floats fits = lesser(fitting(time, per_time + at), fitting(memory, per_memory + at));
        *(floats *)(to->fits + at) += sign * (fits * load(capacity->parts + at));
        *(floats *)(to->suited + at) += sign * where(fits >= 1.0F, worth);
    }
    to->holes += sign * cell.hole;
}

VECTORS static void copies_by_cpu(float *copies, const shp_capacity *capacity, float cpu) {
    if (cpu < 0.0F)
        cpu = 0.0F;
    for (int64_t at = 0; at < capacity->kinds; at += LANES)
        *(floats *)(copies + at) = cpu / load(capacity->cpu + at);
}

/* What eight kinds add to usable capacity. */
static inline floats worth(floats weights, floats by_copies, floats by_cpu, floats fits, floats suited) {
    floats copies = whole_part(lesser(by_cpu, fits));
    return weights * (where(copies >= 1.0F, suited) + copies * by_copies);
}

/* Usable capacity of a node in this state. */
VECTORS static float value_of(const shp_capacity *capacity, const struct state *state, int64_t model) {
    const float *weights = capacity->weights + model * capacity->kinds;
    floats sums = all_of(0.0F);
    for (int64_t at = 0; at < capacity->kinds; at += LANES)
        sums += worth(load(weights + at), load(capacity->by_copies + at), load(state->by_cpu + at),
                      load(state->fits + at), load(state->suited + at));
    return total_of(sums);
}

static int64_t known_model(const shp_columns *columns, const shp_capacity *capacity, int64_t row) {
    return at_most(capacity->models, columns->node_model[row]);
}

static struct state state_in(float *scratch, int64_t kinds) {
    return (struct state){.fits = scratch, .suited = scratch + kinds, .by_cpu = scratch + 2 * kinds, .holes = 0.0F};
}

void shp_hold(const shp_columns *columns, const shp_capacity *capacity, const int64_t *rows, int64_t count,
              float *scratch) {
    int64_t kinds = capacity->kinds;
    for (int64_t number = 0; number < count; number++) {
        int64_t row = rows[number];
        float *held = capacity->held + row * (2 * kinds + 1);
        struct state state = {.fits = held, .suited = held + kinds, .by_cpu = scratch, .holes = 0.0F};
        memset(held, 0, (size_t)(2 * kinds + 1) * sizeof *held);
        for (int64_t at = row * columns->width; at < (row + 1) * columns->width; at++)
            add_cell(&state, capacity, cell_with(capacity, columns->time[at], columns->memory[at], columns->size[at]),
                     1.0F);
        held[2 * kinds] = state.holes;
        copies_by_cpu(state.by_cpu, capacity, columns->cpu[row]);
        capacity->value[row] = value_of(capacity, &state, known_model(columns, capacity, row));
    }
}

/* --- Binpack ------------------------------------------------------------------------------------------------- */

static void start_from(struct state *state, const shp_capacity *capacity, int64_t row) {
    int64_t kinds = capacity->kinds;
    const float *held = capacity->held + row * (2 * kinds + 1);
    memcpy(state->fits, held, (size_t)(2 * kinds) * sizeof *held); /* fits and suited, which lie side by side */
    state->holes = 0.0F;
}

/* A cell as it is, and as it would be with the request on it. */
static struct cell cell_at(const shp_columns *columns, const shp_capacity *capacity, int64_t at) {
    return cell_with(capacity, columns->time[at], columns->memory[at], columns->size[at]);
}

static struct cell cell_after(const shp_columns *columns, const shp_capacity *capacity, const shp_ask *ask,
                              int64_t at) {
    int64_t size = columns->size[at];
    return cell_with(capacity, at_least(0, columns->time[at] - ask->milli),
                     at_least(0, columns->memory[at] - ask->takes[size]), size);
}

static float gain(const shp_columns *columns, const shp_capacity *capacity, const struct state *state, int64_t row) {
    float after = value_of(capacity, state, known_model(columns, capacity, row));
    return after - capacity->value[row] + state->holes * capacity->hole_weight;
}

/* A node of which one cell goes from `before` to `after`. */
struct move {
    const float *held;
    const float *by_cpu;
    const float *weights;
    struct cell before;
    struct cell after;
};

/* Usable capacity of the node after the move. */
VECTORS static float value_moved(const shp_capacity *capacity, const struct move *move) {
    const struct cell before = move->before, after = move->after;
    const float *per_time = capacity->per_time;
    const floats time_before = and_a_half(before.time), memory_before = and_a_half(before.memory);
    const floats time_after = and_a_half(after.time), memory_after = and_a_half(after.memory);
    const floats worth_before = all_of(before.worth), worth_after = all_of(after.worth);
    floats sums = all_of(0.0F);
    for (int64_t at = 0; at < capacity->kinds; at += LANES) {
        floats fit_before = fitting(time_before, per_time + at), fit_after = fitting(time_after, per_time + at);
        if (before.per_memory) {
            fit_before = lesser(fit_before, fitting(memory_before, before.per_memory + at));
            fit_after = lesser(fit_after, fitting(memory_after, after.per_memory + at));
        }
        floats fits = load(move->held + at) + (fit_after - fit_before) * load(capacity->parts + at);
        floats suited = load(move->held + capacity->kinds + at) + where(fit_after >= 1.0F, worth_after) -
                        where(fit_before >= 1.0F, worth_before);
        sums += worth(load(move->weights + at), load(capacity->by_copies + at), load(move->by_cpu + at), fits, suited);
    }
    return total_of(sums);
}

/* What is gained when the request goes to one cell of a node. */
static float gain_at(const shp_columns *columns, const shp_capacity *capacity, const shp_ask *ask, int64_t row,
                     const float *by_cpu, int64_t at) {
    struct move move = {.held = capacity->held + row * (2 * capacity->kinds + 1),
                        .by_cpu = by_cpu,
                        .weights = capacity->weights + known_model(columns, capacity, row) * capacity->kinds,
                        .before = cell_at(columns, capacity, at),
                        .after = cell_after(columns, capacity, ask, at)};
    return value_moved(capacity, &move) - capacity->value[row] +
           (move.after.hole - move.before.hole) * capacity->hole_weight;
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
        float raw = gain_at(columns, capacity, ask, row, state->by_cpu, row * columns->width + cells[number]);
        best.tried++;
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
    for (int64_t number = 0; number < ask->count; number++) {
        int64_t at = row * columns->width + cells[number];
        add_cell(state, capacity, cell_after(columns, capacity, ask, at), 1.0F);
        add_cell(state, capacity, cell_at(columns, capacity, at), -1.0F);
    }
    return (struct known){.score = rounded(capacity, gain(columns, capacity, state, row)), .tried = 2 * ask->count + 1};
}

/* Equal for rows of equal state of which as many cells pass; never 0. */
static uint64_t tag_of(const shp_columns *columns, int64_t row, int64_t passing) {
    uint64_t state = (uint64_t)columns->state[row] ^ ((uint64_t)passing << 56);
    state *= UINT64_C(0x9e3779b97f4a7c15);
    return (state ^ (state >> 32)) | 1;
}

/* Which nodes to look at first: those with a tight cell, for several GPUs or none those with little free. */
static int64_t guess(const shp_columns *columns, const shp_capacity *capacity, const shp_ask *ask, int64_t row,
                     const int64_t *cells, int64_t passing) {
    const int64_t *time = columns->time + row * columns->width;
    if (ask->count != 1) {
        int64_t total = 0;
        for (int64_t cell = 0; cell < columns->width; cell++)
            total += time[cell];
        return -total / 100;
    }
    int64_t free = WHOLE_GPU;
    for (int64_t number = 0; number < passing; number++)
        free = at_most(free, time[cells[number]]);
    int64_t left = at_least(0, free - ask->milli);
    return rounded(capacity, (capacity->hole_worth[left] - capacity->hole_worth[free]) * capacity->hole_weight);
}

/* Whether the request keeps away from a cell of this node. */
static bool keeps_apart(const shp_columns *columns, const shp_ask *ask, int64_t row) {
    return ask->blocked && memchr(ask->blocked + row * columns->width, 1, (size_t)columns->width);
}

static int64_t passing_cells(const shp_columns *columns, const shp_ask *ask, int64_t row, int64_t *cells) {
    return ask->count ? shp_passing(columns, ask, row, cells) : shp_host_passes(columns, ask, row);
}

int64_t shp_update(const shp_columns *columns, const shp_capacity *capacity, const shp_ask *ask, int64_t seen,
                   int64_t work, const shp_scores *scores, float *scratch, int64_t *cells) {
    struct known memo[MEMO];
    struct state state = state_in(scratch, capacity->kinds);
    bool cleared = false;
    for (int64_t row = 0; row < columns->rows; row++) {
        if (columns->stamp[row] <= seen)
            continue;
        int64_t passing = passing_cells(columns, ask, row, cells);
        scores->score[row] = NO_PLACE;
        if (!passing)
            continue;
        if (!cleared)
            memset(memo, 0, sizeof memo);
        cleared = true;
        uint64_t tag = tag_of(columns, row, passing);
        struct known *known = &memo[(tag >> 1) % MEMO];
        if (known->tag != tag || keeps_apart(columns, ask, row)) {
            if (work < 0 && ask->count) {
                scores->score[row] = guess(columns, capacity, ask, row, cells, passing);
                scores->weights[row] = 0;
                continue;
            }
            *known = score_row(columns, capacity, ask, row, &state, cells, passing);
            known->tag = keeps_apart(columns, ask, row) ? 0 : tag; /* which cells are blocked is no part of the state */
            work -= known->tried * capacity->kinds;
        }
        scores->score[row] = known->score;
        scores->cell[row] = known->cell;
        scores->weights[row] = capacity->number;
    }
    return work;
}

/* The first of the highest; -1: none has a place. */
VECTORS static int64_t highest(const int64_t *restrict score, int64_t rows) {
    int64_t most = NO_PLACE;
    for (int64_t row = 0; row < rows; row++)
        most = score[row] > most ? score[row] : most;
    for (int64_t row = 0; row < rows && most > NO_PLACE; row++)
        if (score[row] == most)
            return row;
    return -1;
}

/* As `highest`, of those only that were scored with the weights of this number. */
static int64_t highest_of(const shp_scores *scores, int64_t rows, int64_t number) {
    int64_t best = -1, most = NO_PLACE;
    for (int64_t row = 0; row < rows; row++) {
        if (scores->score[row] > most && scores->weights[row] == number) {
            most = scores->score[row];
            best = row;
        }
    }
    return best;
}

int64_t shp_best(const shp_columns *columns, const shp_capacity *capacity, const shp_ask *ask, int64_t work,
                 const shp_scores *scores, float *scratch, int64_t *cells) {
    struct state state = state_in(scratch, capacity->kinds);
    for (;;) {
        int64_t row = highest(scores->score, columns->rows);
        if (row < 0 || scores->weights[row] == capacity->number)
            return row;
        if (work < 0 && ask->count) {
            int64_t scored = highest_of(scores, columns->rows, capacity->number);
            if (scored >= 0)
                return scored;
        }
        int64_t passing = passing_cells(columns, ask, row, cells);
        if (!passing) {
            scores->score[row] = NO_PLACE;
            continue;
        }
        struct known known = score_row(columns, capacity, ask, row, &state, cells, passing);
        scores->score[row] = known.score;
        scores->cell[row] = known.cell;
        scores->weights[row] = capacity->number;
        work -= known.tried * capacity->kinds;
    }
}
