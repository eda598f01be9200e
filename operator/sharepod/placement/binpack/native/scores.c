/* Scores of nodes for one request class: the inner loops of Binpack.
 *
 * Guarantees:
 * - Writes the outputs listed in scores.h and nothing else. Allocates nothing.
 * - Gives the same answer on every machine: sums are made in a fixed order.
 * - It only ranks. The caller applies the filters before it takes an offer.
 */
#include "filters.h"

#include <math.h>
#include <string.h>

/* Clones of a function for processors with wider vectors, where the loader can choose. All add in the same LANES
 * partial sums. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define VECTORS __attribute__((target_clones("avx2", "default")))
#else
#define VECTORS
#endif

enum { LANES = 8 }; /* number of partial sums; the number of shapes is a multiple of it */

/* Sums over the GPUs of a node. By shape: copies that fit (`fits`), time of the GPUs on which one copy fits
 * (`suited`), and copies that fit the node's CPU (`by_cpu`). `hole_values`: the values of its holes. */
struct node_sums {
    float *fits;
    float *suited;
    float *by_cpu;
    float hole_values;
};

static int64_t at_least(int64_t least, int64_t value) {
    return value > least ? value : least;
}

/* Vector of eight floats, one for each of eight shapes. Its memory need not be aligned. */
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

/* Return the whole part of each value. Values must not be negative. */
static inline floats whole_part(floats value) {
    return __builtin_convertvector(__builtin_convertvector(value, masks), floats);
}

static inline float lanes_of(floats parts) {
    float total = 0.0F;
    for (int lane = 0; lane < LANES; lane++)
        total += parts[lane];
    return total;
}

/* --- Usable capacity ----------------------------------------------------------------------------------------- */

static const float OPEN_AT = 0.5F; /* the same value as OPEN_AT in columns.py */

/* One GPU: free time and memory in thousandths, the time that counts for each shape that fits (`suited`), and its
 * value as a hole. `suited` and `hole` are multiplied by the part of the arrivals that may join its tenants. `open`: 1
 * if copies of requests count on it, else 0. */
struct gpu {
    float time;
    float memory;
    const float *per_memory;
    float suited;
    float hole;
    float open;
};

/* Return how many copies fit into `thousandths`, a whole number plus one half (`and_a_half`). The half prevents a
 * quotient of whole numbers from rounding to the wrong side: the result is exact. */
static inline floats fitting(floats thousandths, const float *per_thousandth) {
    return whole_part(thousandths * load(per_thousandth));
}

static inline floats and_a_half(float thousandths) {
    return all_of(thousandths + 0.5F);
}

static float hole_of(const shp_capacity *capacity, int64_t time, int64_t memory, int64_t size) {
    float by_time = capacity->hole_by_time[time];
    return capacity->hole_by_memory ? fminf(by_time, capacity->hole_by_memory[size * (WHOLE_GPU + 1) + memory])
                                    : by_time;
}

static struct gpu gpu_with(const shp_capacity *capacity, int64_t time, int64_t memory, int64_t size, float worth) {
    if (!capacity->per_memory) /* memory is in proportion to time, so the smaller of both decides */
        time = memory = at_most(time, memory);
    if (size >= capacity->sizes)
        /* a size first seen after the weights were computed has no table row: it counts as the first size until then */
        size = 0;
    return (struct gpu){.time = (float)time,
                        .memory = (float)memory,
                        .per_memory = capacity->per_memory ? capacity->per_memory + size * capacity->shapes : 0,
                        .suited = capacity->mix * (float)time * worth,
                        .hole = hole_of(capacity, time, memory, size) * worth,
                        .open = worth >= OPEN_AT ? 1.0F : 0.0F};
}

/* Return the requests of eight shapes that one GPU adds to the node's sum, given how many copies fit on the GPU. For
 * a shape of several GPUs, a GPU is a part of one request. */
static inline floats parts_of(const shp_capacity *capacity, int64_t at, floats fits) {
    return lesser(fits, load(capacity->of_one + at)) * load(capacity->parts + at);
}

/* Add one GPU to the sums of its node. `sign`: 1, or -1 to subtract it. */
VECTORS static void add_gpu(struct node_sums *to, const shp_capacity *capacity, struct gpu gpu, float sign) {
    const float *per_time = capacity->per_time;
    const float *per_memory = gpu.per_memory ? gpu.per_memory : per_time;
    const floats time = and_a_half(gpu.time), memory = and_a_half(gpu.memory), suited = all_of(gpu.suited);
    for (int64_t at = 0; at < capacity->shapes; at += LANES) {
        floats fits = lesser(fitting(time, per_time + at), fitting(memory, per_memory + at));
        *(floats *)(to->fits + at) += sign * gpu.open * parts_of(capacity, at, fits);
        *(floats *)(to->suited + at) += sign * where(fits >= 1.0F, suited);
    }
    to->hole_values += sign * gpu.hole;
}

/* Return the free CPU, at least NO_CPU of usable_capacity.py: enough for requests without CPU, and too little for
 * any other. */
static float least_cpu(float cpu) {
    const float none = 0x1p-10F;
    return cpu > none ? cpu : none;
}

VECTORS static void copies_by_cpu(float *copies, const shp_capacity *capacity, float cpu) {
    cpu = least_cpu(cpu);
    for (int64_t at = 0; at < capacity->shapes; at += LANES)
        *(floats *)(copies + at) = cpu / load(capacity->cpu + at);
}

/* Return the usable capacity of a node for eight shapes: the time of suited GPUs if one copy fits, and the value of
 * all copies that fit. */
static inline floats usable(floats weights, floats by_copies, floats by_cpu, floats fits, floats suited) {
    floats copies = whole_part(lesser(by_cpu, fits));
    return weights * (where(copies >= 1.0F, suited) + copies * by_copies);
}

/* Return the usable capacity of a node with these sums, over all shapes. */
VECTORS static float value_of(const shp_capacity *capacity, const struct node_sums *sums, int64_t model) {
    const float *weights = capacity->weights + model * capacity->shapes;
    floats total = all_of(0.0F);
    for (int64_t at = 0; at < capacity->shapes; at += LANES)
        total += usable(load(weights + at), load(capacity->by_copies + at), load(sums->by_cpu + at),
                        load(sums->fits + at), load(sums->suited + at));
    return lanes_of(total);
}

/* Return how much of the value `holes` a node's free CPU can serve: the mean over the equal parts of the demand. */
VECTORS static float served(const shp_capacity *capacity, float holes, float cpu) {
    if (!capacity->intensities)
        return holes;
    cpu = least_cpu(cpu);
    floats total = all_of(0.0F);
    for (int64_t at = 0; at < capacity->intensities; at += LANES)
        total += lesser(all_of(holes), cpu * load(capacity->time_by_cpu + at));
    return lanes_of(total) / (float)capacity->intensities;
}

static int64_t known_model(const shp_columns *columns, const shp_capacity *capacity, int64_t node) {
    return at_most(capacity->models, columns->node_model[node]);
}

static struct node_sums sums_in(float *scratch, int64_t shapes) {
    return (struct node_sums){
        .fits = scratch, .suited = scratch + shapes, .by_cpu = scratch + 2 * shapes, .hole_values = 0.0F};
}

/* Return a GPU in its present state. */
static struct gpu gpu_at(const shp_columns *columns, const shp_capacity *capacity, int64_t at) {
    return gpu_with(capacity, columns->time[at], columns->memory[at], columns->size[at], columns->worth[at]);
}

void shp_sum_gpus(const shp_columns *columns, const shp_capacity *capacity, const int64_t *nodes, int64_t count,
                  float *scratch) {
    int64_t shapes = capacity->shapes;
    for (int64_t number = 0; number < count; number++) {
        int64_t node = nodes[number];
        float *of_node = capacity->sums + node * (2 * shapes + 1);
        struct node_sums sums = {.fits = of_node, .suited = of_node + shapes, .by_cpu = scratch, .hole_values = 0.0F};
        memset(of_node, 0, (size_t)(2 * shapes + 1) * sizeof *of_node);
        for (int64_t at = node * columns->width; at < (node + 1) * columns->width; at++)
            add_gpu(&sums, capacity, gpu_at(columns, capacity, at), 1.0F);
        of_node[2 * shapes] = sums.hole_values;
        copies_by_cpu(sums.by_cpu, capacity, columns->cpu[node]);
        capacity->value[node] = value_of(capacity, &sums, known_model(columns, capacity, node)) +
                                served(capacity, sums.hole_values, columns->cpu[node]) * capacity->hole_weight;
    }
}

/* --- Binpack ------------------------------------------------------------------------------------------------- */

static void start_from(struct node_sums *sums, const shp_capacity *capacity, int64_t node) {
    int64_t shapes = capacity->shapes;
    const float *of_node = capacity->sums + node * (2 * shapes + 1);
    memcpy(sums->fits, of_node, (size_t)(2 * shapes) * sizeof *of_node); /* fits and suited, which are adjacent */
    sums->hole_values = of_node[2 * shapes];
}

/* Return the state of a GPU after the request would be placed on it. */
static struct gpu gpu_after(const shp_columns *columns, const shp_capacity *capacity, const shp_request *request,
                            int64_t at) {
    int64_t size = columns->size[at];
    float leaves = columns->interactive_room[at] == 1 ? request->leaves_if_last : request->leaves;
    return gpu_with(capacity, at_least(0, columns->time[at] - request->milli),
                    at_least(0, columns->memory[at] - request->takes[size]), size,
                    (columns->tenants[at] ? columns->worth[at] : request->first_worth) * leaves);
}

/* How much more the node's GPUs with the request's exclusion label are worth to tenants with that label than to all
 * tenants: before and after the request is placed. */
struct label_holes {
    float before;
    float after;
};

/* Return the value of the free part of a GPU with the request's exclusion label: the square of that part, times the
 * value of an idle GPU. So a request costs least on the fullest GPU with room, and other GPUs with the label become
 * empty. An idle GPU has no label and counts as any other hole, so it is never chosen first. */
static float of_label(const shp_capacity *capacity, int64_t time, int64_t memory) {
    float free = (float)at_most(time, memory) / (float)WHOLE_GPU;
    return capacity->hole_by_time[WHOLE_GPU] * free * free;
}

static void add_to_label(struct label_holes *to, const shp_columns *columns, const shp_capacity *capacity,
                         const shp_request *request, int64_t at) {
    if (!request->exclusion || columns->exclusion[at] != request->exclusion)
        return;
    float others = 1.0F - columns->worth[at];
    int64_t time = columns->time[at], memory = columns->memory[at];
    to->before += of_label(capacity, time, memory) * others;
    to->after += of_label(capacity, at_least(0, time - request->milli),
                          at_least(0, memory - request->takes[columns->size[at]])) *
                 others;
}

/* Return the change of value, at most 0, of the GPUs with the label to its tenants, as far as the node's CPU serves
 * them. All other GPUs of the node count as idle. So placing the request on an idle GPU, a larger hole, is no cheaper
 * where CPU is short. */
static float gain_to_label(const shp_columns *columns, const shp_capacity *capacity, const struct label_holes *label,
                           float cpu) {
    if (label->before == label->after)
        return 0.0F;
    float idle = fmaxf(capacity->hole_by_time[WHOLE_GPU] * (float)columns->width, label->before);
    return served(capacity, idle - label->before + label->after, cpu) - served(capacity, idle, cpu);
}

/* Change of one GPU of a node from state `before` to state `after`. `sums`, `by_cpu`, `weights`: numbers of the GPU's
 * node, one for each shape. */
struct move {
    const float *sums;
    const float *by_cpu;
    const float *weights;
    struct gpu before;
    struct gpu after;
};

/* Return the usable capacity of the node after the change of its GPU. */
VECTORS static float value_moved(const shp_capacity *capacity, const struct move *move) {
    const struct gpu before = move->before, after = move->after;
    const float *per_time = capacity->per_time;
    const floats time_before = and_a_half(before.time), memory_before = and_a_half(before.memory);
    const floats time_after = and_a_half(after.time), memory_after = and_a_half(after.memory);
    const floats suited_before = all_of(before.suited), suited_after = all_of(after.suited);
    floats total = all_of(0.0F);
    for (int64_t at = 0; at < capacity->shapes; at += LANES) {
        floats fit_before = fitting(time_before, per_time + at), fit_after = fitting(time_after, per_time + at);
        if (before.per_memory) {
            fit_before = lesser(fit_before, fitting(memory_before, before.per_memory + at));
            fit_after = lesser(fit_after, fitting(memory_after, after.per_memory + at));
        }
        floats fits = load(move->sums + at) + parts_of(capacity, at, fit_after) * after.open -
                      parts_of(capacity, at, fit_before) * before.open;
        floats suited = load(move->sums + capacity->shapes + at) + where(fit_after >= 1.0F, suited_after) -
                        where(fit_before >= 1.0F, suited_before);
        total +=
            usable(load(move->weights + at), load(capacity->by_copies + at), load(move->by_cpu + at), fits, suited);
    }
    return lanes_of(total);
}

/* Return the change of a node's value, usually a loss, if the request goes to the GPU `at`: of its usable capacity,
 * and of its holes as far as the CPU serves them. */
static float gain_at(const shp_columns *columns, const shp_capacity *capacity, const shp_request *request, int64_t node,
                     const float *by_cpu, int64_t at) {
    struct move move = {.sums = capacity->sums + node * (2 * capacity->shapes + 1),
                        .by_cpu = by_cpu,
                        .weights = capacity->weights + known_model(columns, capacity, node) * capacity->shapes,
                        .before = gpu_at(columns, capacity, at),
                        .after = gpu_after(columns, capacity, request, at)};
    float holes = move.sums[2 * capacity->shapes] + move.after.hole - move.before.hole;
    float cpu = columns->cpu[node] - request->cpu;
    struct label_holes label = {0};
    add_to_label(&label, columns, capacity, request, at);
    float left = served(capacity, holes, cpu) + gain_to_label(columns, capacity, &label, cpu);
    return value_moved(capacity, &move) - capacity->value[node] + left * capacity->hole_weight;
}

static int64_t rounded(const shp_capacity *capacity, float raw) {
    return (int64_t)rintf(raw / capacity->round_to);
}

/* Return the best of the passing GPUs of a node, for a request of one GPU. GPUs with the same signature are scored
 * once. */
static shp_scored best_gpu(const shp_columns *columns, const shp_capacity *capacity, const shp_request *request,
                           int64_t node, struct node_sums *sums, const int64_t *gpus, int64_t passing) {
    const int64_t *signature = columns->signature + node * columns->width;
    shp_scored best = {0};
    float highest = 0.0F;
    bool found = false;
    for (int64_t number = 0; number < passing; number++) {
        bool tried = false;
        for (int64_t before = 0; before < number && !tried; before++)
            tried = signature[gpus[before]] == signature[gpus[number]];
        if (tried)
            continue;
        float raw = gain_at(columns, capacity, request, node, sums->by_cpu, node * columns->width + gpus[number]);
        best.tried++;
        if (!found || raw > highest) {
            highest = raw;
            best.gpu = signature[gpus[number]];
            found = true;
        }
    }
    best.score = rounded(capacity, highest);
    return best;
}

/* Sort the GPUs so that the first `count` are the GPUs with the least free time, in order. Equals are ordered by
 * signature, so that nodes of the same signature give the same result. */
static void tightest_first(const int64_t *time, const int64_t *signature, int64_t *gpus, int64_t passing,
                           int64_t count) {
    for (int64_t place = 0; place < count; place++) {
        int64_t tightest = place;
        for (int64_t other = place + 1; other < passing; other++)
            if (time[gpus[other]] < time[gpus[tightest]] ||
                (time[gpus[other]] == time[gpus[tightest]] && signature[gpus[other]] < signature[gpus[tightest]]))
                tightest = other;
        int64_t gpu = gpus[tightest];
        memmove(gpus + place + 1, gpus + place, (size_t)(tightest - place) * sizeof *gpus);
        gpus[place] = gpu;
    }
}

static shp_scored score_node(const shp_columns *columns, const shp_capacity *capacity, const shp_request *request,
                             int64_t node, struct node_sums *sums, int64_t *gpus, int64_t passing) {
    copies_by_cpu(sums->by_cpu, capacity, columns->cpu[node] - request->cpu);
    if (request->count == 1)
        return best_gpu(columns, capacity, request, node, sums, gpus, passing);
    start_from(sums, capacity, node);
    struct label_holes label = {0};
    int64_t first = node * columns->width;
    tightest_first(columns->time + first, columns->signature + first, gpus, passing, request->count);
    for (int64_t number = 0; number < request->count; number++) {
        int64_t at = first + gpus[number];
        add_gpu(sums, capacity, gpu_after(columns, capacity, request, at), 1.0F);
        add_gpu(sums, capacity, gpu_at(columns, capacity, at), -1.0F);
        add_to_label(&label, columns, capacity, request, at);
    }
    float cpu = columns->cpu[node] - request->cpu;
    float left = served(capacity, sums->hole_values, cpu) + gain_to_label(columns, capacity, &label, cpu);
    float after = value_of(capacity, sums, known_model(columns, capacity, node));
    float raw = after - capacity->value[node] + left * capacity->hole_weight;
    return (shp_scored){.score = rounded(capacity, raw), .tried = 2 * request->count + 1};
}

/* Return a tag for the memo of a pass. It is equal for nodes of the same signature and number of passing GPUs, and
 * never 0. */
static uint64_t tag_of(const shp_columns *columns, int64_t node, int64_t passing) {
    uint64_t state = (uint64_t)columns->node_signature[node] ^ ((uint64_t)passing << 56);
    state *= UINT64_C(0x9e3779b97f4a7c15);
    return (state ^ (state >> 32)) | 1;
}

/* Return an estimate of the score. Nodes with a nearly full GPU come first; for
 * several GPUs, nodes with little free time. */
static int64_t guess(const shp_columns *columns, const shp_capacity *capacity, const shp_request *request, int64_t node,
                     const int64_t *gpus, int64_t passing) {
    const int64_t *time = columns->time + node * columns->width;
    if (request->count != 1) {
        int64_t total = 0;
        for (int64_t gpu = 0; gpu < columns->width; gpu++)
            total += time[gpu];
        return -total / 100;
    }
    int64_t free = WHOLE_GPU;
    for (int64_t number = 0; number < passing; number++)
        free = at_most(free, time[gpus[number]]);
    int64_t left = at_least(0, free - request->milli);
    return rounded(capacity, (capacity->hole_by_time[left] - capacity->hole_by_time[free]) * capacity->hole_weight);
}

/* Return the score by which nodes are ranked: the score of the request; if `fewest_idle`, nodes with fewer idle GPUs
 * come first among equals. */
static int64_t ranked(const shp_columns *columns, const shp_capacity *capacity, const shp_request *request,
                      int64_t node, int64_t score) {
    if (!request->count)
        return score;
    return score * RANKS_BY_IDLE - (capacity->fewest_idle ? idle_gpus(columns, node) : 0);
}

/* Return the number of passing GPUs of a node. For a request without GPUs: 1 if the node takes it, else 0. */
static inline int64_t passing(const shp_columns *columns, const shp_request *request, const struct bounds *bounds,
                              int64_t node, int64_t *gpus) {
    return request->count ? passing_gpus(columns, request, bounds, node, gpus) : node_passes(columns, request, node);
}

void shp_score(const shp_columns *columns, const shp_capacity *capacity, const shp_request *request, shp_pass *pass,
               int64_t pause, const shp_scores *scores, float *scratch, int64_t *gpus) {
    struct node_sums sums = sums_in(scratch, capacity->shapes);
    const struct bounds bounds = bounds_of(columns, request);
    for (; pass->node < columns->nodes && pass->work >= pause; pass->node++) {
        int64_t node = pass->node;
        if (columns->changed_at[node] <= pass->seen)
            continue;
        int64_t found = passing(columns, request, &bounds, node, gpus);
        scores->score[node] = NO_PLACE;
        if (!found)
            continue;
        if (!pass->cleared)
            memset(pass->memo, 0, sizeof pass->memo);
        pass->cleared = 1;
        uint64_t tag = tag_of(columns, node, found);
        shp_scored *scored = &pass->memo[(tag >> 1) % SHP_MEMO];
        if (scored->tag != tag) {
            if (pass->work < 0 && request->count) {
                int64_t guessed = guess(columns, capacity, request, node, gpus, found);
                scores->score[node] = ranked(columns, capacity, request, node, guessed);
                scores->weights[node] = 0;
                continue;
            }
            *scored = score_node(columns, capacity, request, node, &sums, gpus, found);
            scored->tag = tag;
            pass->work -= scored->tried * capacity->shapes;
        }
        scores->score[node] = ranked(columns, capacity, request, node, scored->score);
        scores->gpu[node] = scored->gpu;
        scores->weights[node] = capacity->number;
    }
}

/* Return the first node with the highest score. -1 if no node takes the request. */
VECTORS static int64_t highest(const int64_t *restrict score, int64_t nodes) {
    int64_t most = NO_PLACE;
    for (int64_t node = 0; node < nodes; node++)
        most = score[node] > most ? score[node] : most;
    for (int64_t node = 0; node < nodes && most > NO_PLACE; node++)
        if (score[node] == most)
            return node;
    return -1;
}

/* Do what `highest` does, only among the nodes whose scores were computed by the weights of this number. */
static int64_t highest_of(const shp_scores *scores, int64_t nodes, int64_t number) {
    int64_t best = -1, most = NO_PLACE;
    for (int64_t node = 0; node < nodes; node++) {
        if (scores->score[node] > most && scores->weights[node] == number) {
            most = scores->score[node];
            best = node;
        }
    }
    return best;
}

int64_t shp_best(const shp_columns *columns, const shp_capacity *capacity, const shp_request *request, int64_t work,
                 const shp_scores *scores, float *scratch, int64_t *gpus) {
    struct node_sums sums = sums_in(scratch, capacity->shapes);
    const struct bounds bounds = bounds_of(columns, request);
    for (;;) {
        int64_t node = highest(scores->score, columns->nodes);
        if (node < 0 || scores->weights[node] == capacity->number)
            return node;
        if (work < 0 && request->count) {
            int64_t scored = highest_of(scores, columns->nodes, capacity->number);
            if (scored >= 0)
                return scored;
        }
        int64_t found = passing(columns, request, &bounds, node, gpus);
        if (!found) {
            scores->score[node] = NO_PLACE;
            continue;
        }
        shp_scored scored = score_node(columns, capacity, request, node, &sums, gpus, found);
        scores->score[node] = ranked(columns, capacity, request, node, scored.score);
        scores->gpu[node] = scored.gpu;
        scores->weights[node] = capacity->number;
        work -= scored.tried * capacity->shapes;
    }
}
