/* What `sharepod.placement.binpack.scores` asks of C: which nodes take a request, and what each costs.
 *
 * All arrays belong to the caller, are contiguous and outlive the call. A row is a node, a cell one of its GPUs; the
 * words are those of columns.py and usable.py. Read by cffi as it stands: no preprocessor lines but the guard.
 */
#ifndef SHAREPOD_SCORES_H
#define SHAREPOD_SCORES_H

#include <stdint.h>

/* The books of all nodes. Of `rows`: cpu, model, state, stamp; `room` has two numbers for each. The others are of
 * rows x width. */
typedef struct {
    int64_t rows;
    int64_t width;
    const int64_t *room;
    const int64_t *stamp;
    const int64_t *state;
    const float *cpu;
    const int64_t *node_model;
    const int64_t *free;
    const int64_t *bytes;
    const int64_t *by_memory;
    const int64_t *plain;
    const int64_t *time;
    const int64_t *memory;
    const int64_t *size;
    const int64_t *model;
    const int64_t *label;
    const int64_t *tenants;
    const int64_t *like;
} shp_columns;

/* Usable capacity under one estimate of the demand, which has a `number` from 1 on. `kinds` is a
 * multiple of eight; those that fill it up have no weight. How many of each kind fit into one
 * thousandth: `per_time` by time, `per_memory` (sizes x kinds) by memory, null where all memory is in proportion.
 * `weights` is of (models + 1) x kinds, `hole_worth` of 1001 by time, `hole_memory` (sizes x
 * 1001) by memory, null with `per_memory`: the lesser of the two counts. `held` (rows x (2 kinds + 1)) and `value`
 * (rows) are what `shp_hold` keeps of each row. */
typedef struct {
    int64_t number;
    int64_t kinds;
    int64_t models;
    int64_t sizes;
    const float *per_time;
    const float *per_memory;
    const float *parts;
    const float *cpu;
    const float *by_copies;
    const float *weights;
    const float *hole_worth;
    const float *hole_memory;
    float mix;
    float hole_weight;
    float round_to;
    float *held;
    float *value;
} shp_capacity;

/* One kind of request. `memory`: bytes, -1: in proportion to `milli`. `exclusion`: the label that all tenants of a cell
 * need to have, 0: none. `takes`: for each size the thousandths of memory that it takes. `models` (by number), `nodes`
 * (by row) and `blocked` (by cell): null, or 1 where it may go, for `blocked` where it may not. */
typedef struct {
    int64_t count;
    int64_t milli;
    int64_t memory;
    int64_t exclusion;
    int64_t whole;
    int64_t room_cpu;
    int64_t room_memory;
    float cpu;
    const int64_t *takes;
    const uint8_t *models;
    const uint8_t *nodes;
    const uint8_t *blocked;
} shp_ask;

/* Scores of all rows for one kind of request, the lowest number where it does not fit; what the best cell of each is
 * like; the number of the weights that it was made with, 0: it is a guess. */
typedef struct {
    int64_t *score;
    int64_t *cell;
    int64_t *weights;
} shp_scores;

/* The cells of one row that pass, in order; how many. `cells` has room for the width. 0 where the node does not pass
 * or has fewer than asked. */
int64_t shp_passing(const shp_columns *columns, const shp_ask *ask, int64_t row, int64_t *cells);

/* Scores the rows that changed after `seen` anew, the lowest number where none fits. Returns what is left of `work`,
 * that is cells times kinds that are made anew: once it is used up, rows are only guessed. `scratch` has room for 3 x
 * kinds numbers, here and below. */
int64_t shp_update(const shp_columns *columns, const shp_capacity *capacity, const shp_ask *ask, int64_t seen,
                   int64_t work, const shp_scores *scores, float *scratch, int64_t *cells);

/* The best row, -1 where none has a place; the first of equals. What looks best is made anew until what is best was
 * made with the weights that hold, or the work is done: then the best of those that were. */
int64_t shp_best(const shp_columns *columns, const shp_capacity *capacity, const shp_ask *ask, int64_t work,
                 const shp_scores *scores, float *scratch, int64_t *cells);

/* Makes `held` and `value` of these rows anew. */
void shp_hold(const shp_columns *columns, const shp_capacity *capacity, const int64_t *rows, int64_t count,
              float *scratch);

/* Scores all rows by what is free on the fullest of the GPUs taken. */
void shp_most_free(const shp_columns *columns, const shp_ask *ask, int64_t *score, int64_t *cells);

/* Scores all rows by how little is promised on the GPUs taken, those in use first; then by how few are idle. */
void shp_least_promised(const shp_columns *columns, const shp_ask *ask, int64_t *score, int64_t *cells);

#endif
