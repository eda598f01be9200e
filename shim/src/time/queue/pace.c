/* A window is the launches between two fences (pace.h). It should take the GPU WINDOW_SHORT to WINDOW_LONG, so its
 * number of launches doubles, up to PACE_WINDOW_MOST, while a window takes less. It is halved, down to 1, while a
 * window takes more. With shorter windows, the GPU would become idle whenever the thread wakes up late. If the tenant
 * holds the GPU alone (wide queue), windows take longer, so that the thread waits less often.
 *
 * A launch that would begin after the end of the quantum waits for the next quantum (PC2). So when the gate closes, at
 * most one launch of each stream is unfinished, and has begun. The announced end of the work, at which the agent grants
 * the next tenant, is then correct.
 */
#include "time/queue/pace.h"

/* All in ns. */
#define WINDOW_SHORT 2000000ull
#define WINDOW_LONG 5000000ull
#define WIDE_SHORT 20000000ull
#define MARGIN 250000ull /* no launch begins less than this before the end of the quantum */
#define LATE 1500000ull  /* a check that comes this much after the last check is late: longer than the longest sleep */

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static uint64_t most(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

/* Return the number of further launches that would begin before the quantum ends. */
static uint64_t fitting(const struct pace *pace, uint64_t now, uint64_t deadline) {
    uint64_t each = pace->estimate.launch_ns, begins = most(pace->estimate.ends_at, now);
    if (deadline == PACE_NEVER || each == 0)
        return PACE_WIDE_MOST;
    uint64_t left = deadline > begins ? deadline - begins : 0, margin = least(each / 16, MARGIN);
    return left > margin ? (left - margin - 1) / each + 1 : 0;
}

bool pace_plan(struct pace *pace, uint64_t now, uint64_t deadline) {
    uint64_t fits = fitting(pace, now, deadline), size = pace->window.size;
    if (pace->window.keeps_short && !pace->window.wide && pace->estimate.launch_ns > 0)
        size = least(size, most(PACE_LEAD / pace->estimate.launch_ns, 1));
    pace->window.quota = (uint16_t)least(size, fits > 0 ? fits : 1);
    pace->window.full = (fits == 0 || pace->queue.carried) && pace->window.free_launches == 0;
    return pace->window.full;
}

/* Return true if a check shows the end of work that began at `begun` precisely: with an error of at most LATE plus an
 * eighth of the work's duration. A thread that gets no processor time checks too late (PC7). */
static bool in_time(struct pace_look look, uint64_t begun) {
    return look.before != 0 && look.at - look.before <= LATE + (look.at - begun) / 8;
}

/* Update the duration of a launch. `sample`: ns, an upper bound. `exact`: `sample` is the duration. */
static void learn(struct pace_estimate *estimate, uint64_t sample, bool exact) {
    if (estimate->launch_ns == 0)
        estimate->launch_ns = sample;
    else if (exact)
        estimate->launch_ns = estimate->launch_ns / 2 + sample / 2;
    else
        estimate->launch_ns = least(estimate->launch_ns, sample);
    estimate->learned = true;
}

void pace_others(struct pace *pace, uint64_t co_runs) {
    struct pace_estimate *estimate = &pace->estimate;
    estimate->touched |= (co_runs & 1) || co_runs != estimate->co_runs;
    estimate->co_runs = co_runs;
}

/* Switch `launch_ns` to the duration while other tenants co-run (`shared`) or do not. If the duration of that case is
 * not known yet, it starts with that of the other case. */
static void go_by(struct pace_estimate *estimate, bool shared) {
    if (estimate->shared == shared)
        return;
    uint64_t other = estimate->other_ns ? estimate->other_ns : estimate->launch_ns;
    estimate->other_ns = estimate->launch_ns;
    estimate->launch_ns = other;
    estimate->shared = shared;
}

/* Start a new measurement of the launch duration. `touched` becomes true if other tenants co-run at any time of it. */
static void look_anew(struct pace_estimate *estimate) {
    estimate->touched = estimate->co_runs & 1;
    go_by(estimate, estimate->touched);
}

void pace_open(struct pace *pace, uint64_t now, uint64_t deadline, struct pace_look drained) {
    struct pace_estimate *estimate = &pace->estimate;
    struct pace_queue *queue = &pace->queue;
    if (pace->window.size == 0)
        pace->window.size = 1;
    go_by(estimate, estimate->touched);
    if (estimate->blocked_at_close && queue->unfinished > 0 && drained.at > estimate->waited_at) {
        uint64_t begun = estimate->seen_late ? queue->begun_at[0] : estimate->waited_at;
        bool exact = !estimate->seen_late && !estimate->learned && in_time(drained, begun);
        learn(estimate, (drained.at - begun) / queue->unfinished, exact);
    }
    *queue = (struct pace_queue){.fenced_at = now};
    look_anew(estimate);
    estimate->learned = estimate->start_known = estimate->seen_late = estimate->blocked_at_close = false;
    estimate->waited_at = estimate->ends_at = now;
    estimate->graphs_end_at = 0;
    pace_plan(pace, now, deadline);
    pace->window.full = false;
}

bool pace_undrained(const struct pace *pace, uint64_t drained) {
    return pace->queue.unfinished > 0 && drained < pace->queue.fenced_at;
}

/* Raises the estimated duration of a launch, so that the unfinished launches take at least the time that has already
 * passed. */
void pace_carry(struct pace *pace, uint64_t now, uint64_t deadline) {
    struct pace_estimate *estimate = &pace->estimate;
    go_by(estimate, estimate->touched);
    estimate->launch_ns = most(estimate->launch_ns, (now - estimate->waited_at) / pace->queue.unfinished);
    estimate->ends_at = most(now, estimate->waited_at + estimate->launch_ns * pace->queue.unfinished);
    if (pace->queue.carried)
        pace_gave_up(pace, false);
    pace->queue.carried = true;
    pace_plan(pace, now, deadline);
}

void pace_widen(struct pace *pace, bool wide) {
    struct pace_window *window = &pace->window;
    window->wide = wide;
    while (!wide && window->size > 1 &&
           (window->size > PACE_WINDOW_MOST || pace->estimate.launch_ns * window->size > WINDOW_LONG))
        window->size /= 2;
}

void pace_keep_short(struct pace *pace, bool keeps_short) {
    pace->window.keeps_short = keeps_short;
}

uint64_t pace_next_launch(const struct pace *pace, uint64_t now) {
    uint64_t ends = pace->estimate.ends_at;
    const struct pace_window *window = &pace->window;
    bool known = window->keeps_short && !window->wide && pace->estimate.launch_ns > 0 && window->free_launches == 0;
    return known && pace->queue.count == 0 && ends > now + PACE_LEAD ? ends - PACE_LEAD : now;
}

void pace_ran_dry(struct pace *pace, uint64_t now) {
    pace->estimate.ends_at = least(pace->estimate.ends_at, now);
}

bool pace_holds_back(struct pace *pace, uint64_t now, uint64_t deadline) {
    if (pace->window.full)
        pace->estimate.blocked_at_close = pace_plan(pace, now, deadline);
    return pace->window.full;
}

uint32_t pace_passing(const struct pace *pace) {
    uint32_t quota = pace->window.quota, count = pace->queue.count;
    return pace->window.free_left + (quota > count ? quota - count : 1);
}

bool pace_launched(struct pace *pace, uint32_t launches) {
    uint32_t free_launches = (uint32_t)least(launches, pace->window.free_left);
    pace->window.free_left = (uint16_t)(pace->window.free_left - free_launches);
    pace->queue.count = (uint16_t)(pace->queue.count + launches - free_launches);
    return pace->queue.count >= pace->window.quota;
}

bool pace_fenced(struct pace *pace, uint64_t now, uint64_t deadline) {
    struct pace_queue *queue = &pace->queue;
    struct pace_estimate *estimate = &pace->estimate;
    uint8_t place = queue->fences < PACE_FENCES ? queue->fences : PACE_FENCES - 1; /* or the last place */
    queue->sizes[place] = queue->count;
    queue->begun_at[place] = queue->fenced_at;
    queue->unfinished += queue->count;
    queue->fenced_at = now;
    estimate->ends_at = most(estimate->ends_at, now) + estimate->launch_ns * queue->count;
    queue->count = 0;
    queue->fences = (uint8_t)(place + 1);
    if (queue->fences < PACE_FENCES)
        pace_plan(pace, now, deadline);
    else if (pace_plan(pace, now, deadline)) /* no launch fits, so the thread can do other work until the next quantum
                                              */
        queue->put_off = true;
    else
        return true;
    return false;
}

void pace_unfenced(struct pace *pace) {
    pace->queue.count = 0;
}

uint64_t pace_due(const struct pace *pace, uint64_t now) {
    uint64_t behind = pace->estimate.launch_ns * pace->queue.sizes[1];
    return pace->estimate.ends_at > now + behind ? pace->estimate.ends_at - behind : now;
}

void pace_passed(struct pace *pace, struct pace_look seen) {
    struct pace_queue *queue = &pace->queue;
    struct pace_window *window = &pace->window;
    struct pace_estimate *estimate = &pace->estimate;
    go_by(estimate, estimate->touched);
    uint64_t now = seen.at, begun = estimate->waited_at, before = queue->sizes[0] ? queue->sizes[0] : 1,
             full = (now - begun) * window->size / before;
    bool waited = seen.before != 0, exact = in_time(seen, estimate->start_known ? begun : queue->begun_at[0]);
    bool first = !estimate->start_known &&
                 !estimate->seen_late; /* first window of the opening: its work began some time after `begun` */
    if (waited && estimate->start_known)
        learn(estimate, (now - begun) / before, exact);
    else if (waited || estimate->launch_ns != 0)
        learn(estimate, (now - queue->begun_at[0]) / before, false);
    if (waited && !exact && !first)
        estimate->launch_ns = most(estimate->launch_ns, (seen.before - least(seen.before, begun)) / before);
    if (waited)
        full = estimate->launch_ns * window->size;
    uint64_t shortest = window->wide ? WIDE_SHORT : WINDOW_SHORT, longest = window->wide ? PACE_WIDE_LONG : WINDOW_LONG;
    for (bool more = true; more && full > longest && window->size > 1; more = waited) {
        window->size /= 2; /* only one halving if the thread did not wait: it may not have run for a while */
        full /= 2;
    }
    if (full < shortest && window->size < (window->wide ? PACE_WIDE_MOST : PACE_WINDOW_MOST))
        window->size = (uint16_t)(window->size * 2);
    estimate->waited_at = now;
    look_anew(estimate);
    estimate->start_known = exact;
    estimate->seen_late = !exact;
    uint64_t behind = now + estimate->launch_ns * queue->sizes[1];
    estimate->ends_at = exact ? behind : least(estimate->ends_at, behind);
    estimate->graphs_end_at = least(estimate->graphs_end_at, now + estimate->graph_ns * queue->sizes[1]);
    queue->unfinished -= (uint32_t)least(queue->unfinished, queue->sizes[0]);
    queue->sizes[0] = queue->sizes[1];
    queue->begun_at[0] = queue->begun_at[1];
    queue->fences = PACE_FENCES - 1;
    queue->put_off = false;
    window->free_launches = window->free_left = 0;
}

void pace_gave_up(struct pace *pace, bool closed) {
    struct pace_window *window = &pace->window;
    pace->estimate.blocked_at_close = closed;
    pace->queue.put_off = false;
    if (closed)
        return;
    uint64_t first = window->wide ? window->size : 1;
    window->free_launches =
        (uint16_t)(window->free_launches ? least(window->free_launches * 2ull, PACE_FREE_MOST) : first);
    window->free_left = window->free_launches;
    window->size = 1;
}

void pace_let_pass(struct pace *pace) {
    pace->queue.put_off = false;
    pace->window.free_launches = pace->window.free_left = PACE_WINDOW_MOST;
}

bool pace_graph_fits(const struct pace *pace, uint64_t now, uint64_t deadline, uint64_t duration) {
    return deadline == PACE_NEVER || most(pace->estimate.graphs_end_at, now) + duration <= deadline;
}

void pace_graph(struct pace *pace, uint64_t now, uint64_t duration) {
    pace->estimate.graph_ns = duration;
    pace->estimate.graphs_end_at = most(pace->estimate.graphs_end_at, now) + duration;
}
