/* Interface of `sharepod.placement.binpack.scores` to C: which nodes take a request, and the score of each.
 *
 * All arrays belong to the caller, are contiguous and outlive the call. Terms are defined in columns.py and
 * usable_capacity.py. cffi reads this file unprocessed: the only preprocessor lines are the guard and the include.
 */
#ifndef SHAREPOD_SCORES_H
#define SHAREPOD_SCORES_H

#include <stdint.h>

/* The columns, defined in columns.py. Of shape (nodes): cpu, node_model, node_signature, changed_at. Of shape
 * (nodes, 2): room. Of shape (nodes, width): all others. */
typedef struct {
    int64_t nodes;
    int64_t width;
    const int64_t *room;
    const int64_t *changed_at;
    const int64_t *node_signature;
    const float *cpu;
    const int64_t *node_model;
    const int64_t *share;
    const int64_t *bytes;
    const int64_t *share_in_proportion;
    const int64_t *time;
    const int64_t *memory;
    const int64_t *size;
    const int64_t *model;
    const int64_t *exclusion;
    const int64_t *tenants;
    const int64_t *labels;
    const int64_t *interactive_room;
    const float *worth;
    const int64_t *signature;
} shp_columns;

/* Usable capacity under one estimate of the demand, which has a `number` from 1 on.
 *
 * - `shapes`: a multiple of eight; padding shapes have no weight.
 * - `per_time` (shapes) and `per_memory` (sizes x shapes): copies that fit into one thousandth; `per_memory` is null if
 *   all memory is in proportion to time.
 * - `of_one` (shapes): most copies of a request that count on one GPU.
 * - `weights`: (models + 1) x shapes.
 * - `hole_by_time` (1001) and `hole_by_memory` (sizes x 1001; null with `per_memory`): value as a hole; the lesser
 *   counts.
 * - `time_by_cpu` (intensities, a multiple of eight): thousandths of a GPU that one thousandth of a core serves, for
 *   equal parts of the demand.
 * - `fewest_idle`: 1: among nodes with equal scores the one with the fewest idle GPUs is taken; 0: the first.
 * - `sums` (nodes x (2 shapes + 1)) and `value` (nodes): results of `shp_sum_gpus` for each node.
 */
typedef struct {
    int64_t number;
    int64_t shapes;
    int64_t models;
    int64_t sizes;
    const float *per_time;
    const float *per_memory;
    const float *parts;
    const float *of_one;
    const float *cpu;
    const float *by_copies;
    const float *weights;
    const float *hole_by_time;
    const float *hole_by_memory;
    int64_t intensities;
    const float *time_by_cpu;
    float mix;
    float hole_weight;
    float round_to;
    int64_t fewest_idle;
    float *sums;
    float *value;
} shp_capacity;

/* One request class.
 *
 * - `memory`: bytes; negative: no bytes, see `takes` (MemoryShare in demand.py).
 * - `exclusion`: the label that all tenants of a GPU must have, 0: none.
 * - `first_worth`: worth of a GPU with the request as its only tenant.
 * - `leaves`: part of any GPU's worth that remains with the request; `leaves_if_last`: the same of a GPU that has room
 *   for one interactive tenant.
 * - `takes` (sizes): thousandths of a GPU's memory that the request takes.
 * - `interactive`: 1 if the request fits only GPUs with room for an interactive tenant.
 * - `model_mask` (models) and `node_mask` (nodes): 1 where the request may go; null: everywhere.
 * - `keeps_off` (combinations of labels): 1 where the request may not go; null: nowhere.
 */
typedef struct {
    int64_t count;
    int64_t milli;
    int64_t memory;
    int64_t exclusion;
    int64_t whole;
    int64_t interactive;
    int64_t room_cpu;
    int64_t room_memory;
    float cpu;
    float first_worth;
    float leaves;
    float leaves_if_last;
    const int64_t *takes;
    const uint8_t *model_mask;
    const uint8_t *node_mask;
    const uint8_t *keeps_off;
} shp_request;

/* Scores of all nodes for one request class, arrays of shape (nodes). `score`: INT64_MIN if the node does not take
 * the class. `gpu`: signature of the node's best GPU. `weights`: number of the weights by which the score was computed;
 * 0: an estimate. */
typedef struct {
    int64_t *score;
    int64_t *gpu;
    int64_t *weights;
} shp_scores;

enum { SHP_MEMO = 512 }; /* number of node signatures whose score a pass remembers; a power of two */

/* Score of a node signature, computed once per pass for all nodes with it. `tag` 0: the entry is empty. `gpu`:
 * signature of the best GPU. `tried`: number of scored GPUs. */
typedef struct {
    uint64_t tag;
    int64_t score;
    int64_t gpu;
    int64_t tried;
} shp_scored;

/* Pass over the nodes that have changed after version `seen`, from index `node` on. `work`: the remaining work, in
 * GPUs x shapes. While it is negative, nodes get only an estimate. `memo` belongs to one request and capacity, and is
 * valid once `cleared` is 1. */
typedef struct {
    int64_t seen;
    int64_t node;
    int64_t work;
    int64_t cleared;
    shp_scored memo[SHP_MEMO];
} shp_pass;

/* Write the positions of the passing GPUs of one node, in order, to `gpus`, which has room for the width. Return their
 * number; 0 if the node does not pass or has fewer than requested. */
int64_t shp_passing(const shp_columns *columns, const shp_request *request, int64_t node, int64_t *gpus);

/* Score the nodes of a pass until all are done, or its `work` falls below `pause`. `scratch` has room for 3 x shapes
 * numbers, here and below. */
void shp_score(const shp_columns *columns, const shp_capacity *capacity, const shp_request *request, shp_pass *pass,
               int64_t pause, const shp_scores *scores, float *scratch, int64_t *gpus);

/* Return the best node, the first of equals; -1 if no node takes the request. The best candidate is scored again
 * until its score has the present weights, or the work is used up. In the latter case the best node with present
 * weights is returned. */
int64_t shp_best(const shp_columns *columns, const shp_capacity *capacity, const shp_request *request, int64_t work,
                 const shp_scores *scores, float *scratch, int64_t *gpus);

/* Compute `sums` and `value` of these nodes. */
void shp_sum_gpus(const shp_columns *columns, const shp_capacity *capacity, const int64_t *nodes, int64_t count,
                  float *scratch);

/* Score all nodes for Spread: by the free part of the fullest of the GPUs that the request would get. */
void shp_most_free(const shp_columns *columns, const shp_request *request, int64_t *score, int64_t *gpus);

/* Score all nodes for best effort: least guaranteed time first, idle GPUs last; then fewest idle GPUs. */
void shp_least_promised(const shp_columns *columns, const shp_request *request, int64_t *score, int64_t *gpus);

#endif
