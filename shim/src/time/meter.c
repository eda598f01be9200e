/* The bounded queue of a stream. An event (fence) is recorded behind every window of launches, and the thread waits for
 * the fence before: at most two windows are unfinished (Q1). A window grows to WINDOW_MOST launches while it takes less
 * than WINDOW_SHORT, and shrinks to one launch while it takes more than WINDOW_LONG. A shorter queue would let the GPU
 * run dry whenever the thread is late to wake up.
 *
 * From the fences the meter learns how long a launch occupies the GPU, and so when what is launched will have ended. A
 * launch that would begin after the end of the quantum waits for the next one (Q2): the gate leaves less than one
 * launch of each stream when it closes, and the announced end, by which the next holder is granted, comes true.
 *
 * A wait ends with the opening, after which nothing passes the gate anyway, and after PATIENCE (Q3): then one launch
 * may pass before the next wait, after another wait in vain two, then four. A queue that was filled before it was
 * metered stays as it is meanwhile.
 */
#include "time/meter.h"

#include "base/sys.h"
#include "driver/entries.h"
#include "driver/own_calls.h"

enum { WINDOW_MOST = 64 };  /* launches: so many share the cost of a fence */
#define PATIENCE SYS_SECOND /* ns of one wait: most kernels are shorter, and the meter learns how long they take */
#define WINDOW_SHORT (2 * SYS_MS)
#define WINDOW_LONG (5 * SYS_MS)
#define MARGIN (SYS_MS / 4) /* so little before the end of the quantum no launch begins */
#define POLL_LEAST (20 * 1000ull)
#define POLL_MOST SYS_MS

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static uint64_t most(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

/* Return how many more launches begin before the quantum ends. */
static uint64_t fitting(const struct gate *gate, const struct slot_stream *entry, uint64_t now) {
    uint64_t deadline = atomic_load(&gate->deadline), each = entry->estimate.launch_ns,
             begins = most(entry->estimate.ends_at, now);
    if (deadline == SYS_NEVER || each == 0)
        return WINDOW_MOST;
    uint64_t left = deadline > begins ? deadline - begins : 0, margin = least(each / 16, MARGIN);
    return left > margin ? (left - margin + each - 1) / each : 0;
}

/* Plan, after a fence or when an opening begins, how many launches pass until the next fence. True: none (Q2). */
static bool plan(const struct gate *gate, struct slot_stream *entry, uint64_t now) {
    uint64_t fits = fitting(gate, entry, now);
    entry->window.quota = (uint16_t)least(entry->window.size, fits > 0 ? fits : 1);
    entry->window.quantum_full = fits == 0 && entry->window.free_launches == 0;
    if (entry->window.quantum_full)
        entry->registered.gate_word = 0; /* the next launch looks whether it is so still */
    return entry->window.quantum_full;
}

/* Learn how long a launch takes. `sample`: ns, at most; `exact`: and no less. */
static void learn(struct slot_stream *entry, uint64_t sample, bool exact) {
    if (entry->estimate.launch_ns == 0)
        entry->estimate.launch_ns = sample;
    else if (exact)
        entry->estimate.launch_ns = (entry->estimate.launch_ns + sample) / 2;
    else
        entry->estimate.launch_ns = least(entry->estimate.launch_ns, sample);
    entry->window.launch_ns_learned = true;
}

void meter_begin(struct gate *gate, struct slot_stream *entry) {
    uint32_t opening = atomic_load(&gate->next_closing);
    if (!entry->registered.metered || entry->window.opening == opening)
        return;
    uint64_t now = sys_now(), drained = atomic_load(&gate->drained);
    if (entry->window.blocked_at_close && entry->window.unfinished > 0 && drained > entry->window.waited_at) {
        uint64_t begun = entry->window.seen_late ? entry->window.begun_at[0] : entry->window.waited_at;
        learn(entry, (drained - begun) / entry->window.unfinished,
              !entry->window.seen_late && !entry->window.launch_ns_learned);
    }
    entry->window.opening = opening;
    entry->window.count = entry->window.fences = 0;
    entry->window.unfinished = 0;
    entry->window.skipped = entry->window.blocked_at_close = entry->window.launch_ns_learned =
        entry->window.start_known = entry->window.seen_late = false;
    entry->window.waited_at = entry->window.fenced_at = entry->estimate.ends_at = now;
    plan(gate, entry, now);
    entry->window.quantum_full = false;
}

bool meter_holds_back(struct gate *gate, struct slot_stream *entry) {
    if (!entry->window.quantum_full || entry->window.opening != atomic_load(&gate->next_closing))
        return false;
    entry->window.blocked_at_close = plan(gate, entry, sys_now());
    return entry->window.blocked_at_close;
}

/* Tell the hook thread when the last of this thread's streams is expected to end. */
static void foretell(struct slot *slot, const struct slot_stream *entry) {
    uint64_t ends = entry->estimate.ends_at;
    for (int i = 0; i < SLOT_STREAMS; i++)
        if (slot->streams[i].window.opening == entry->window.opening)
            ends = most(ends, slot->streams[i].estimate.ends_at);
    atomic_store_explicit(&slot->ends_at, ends, memory_order_relaxed);
}

/* Adapt the size of the window to the one that has finished; another is unfinished. `waited`: the thread had to wait.
 */
static void adapt(struct slot *slot, struct slot_stream *entry, bool waited, uint64_t now) {
    uint64_t full = (now - entry->window.waited_at) * entry->window.size / entry->window.sizes[0];
    if (waited && entry->window.start_known)
        learn(entry, (now - entry->window.waited_at) / entry->window.sizes[0], true);
    else if (waited || entry->estimate.launch_ns != 0)
        learn(entry, (now - entry->window.begun_at[0]) / entry->window.sizes[0], false);
    if (waited)
        full = entry->estimate.launch_ns * entry->window.size;
    while (full > WINDOW_LONG && entry->window.size > 1) {
        entry->window.size /= 2;
        full /= 2;
    }
    if (full < WINDOW_SHORT && entry->window.size < WINDOW_MOST)
        entry->window.size *= 2;
    entry->window.waited_at = now;
    entry->window.start_known = waited;
    entry->window.seen_late = !waited;
    uint64_t behind = now + entry->estimate.launch_ns * entry->window.sizes[1];
    entry->estimate.ends_at = waited ? behind : least(entry->estimate.ends_at, behind);
    foretell(slot, entry);
    entry->estimate.graphs_end_at =
        least(entry->estimate.graphs_end_at, now + entry->estimate.last_graph_ns * entry->window.sizes[1]);
}

/* Expect one more window to finish, behind those that are unfinished. */
static void expect(struct slot *slot, struct slot_stream *entry, uint64_t now) {
    entry->estimate.ends_at = most(entry->estimate.ends_at, now) + entry->estimate.launch_ns * entry->window.count;
    foretell(slot, entry);
}

/* Wait for the older fence. False: the wait reached one of its bounds (Q3). `waited`: the fence had not passed at
 * first. */
static bool wait_for(const struct gate *gate, struct slot *slot, struct slot_stream *entry, bool *waited) {
    CUevent event = entry->window.events[0];
    *waited = DRIVER(cuEventQuery)(event) == CUDA_ERROR_NOT_READY;
    if (!*waited)
        return true;
    bool passed = false;
    atomic_store_explicit(&slot->waits_for_fence, true, memory_order_relaxed);
    uint64_t begun = sys_now(), since = 0, behind = entry->estimate.launch_ns * entry->window.sizes[1],
             due = entry->estimate.ends_at > begun + behind ? entry->estimate.ends_at - behind : begun;
    do {
        if (since > PATIENCE)
            entry->window.free_left = entry->window.free_launches =
                entry->window.free_launches ? least(entry->window.free_launches * 2ull, UINT16_MAX) : 1;
        entry->window.blocked_at_close = !(atomic_load(&gate->word) & GATE_OPEN);
        if (since > PATIENCE || entry->window.blocked_at_close)
            break;
        uint64_t now = begun + since, off = now > due ? now - due : due - now;
        sys_sleep(off / 8 < POLL_LEAST ? POLL_LEAST : least(off / 8, POLL_MOST));
        since = sys_now() - begun;
        passed = DRIVER(cuEventQuery)(event) != CUDA_ERROR_NOT_READY;
    } while (!passed);
    atomic_store_explicit(&slot->waits_for_fence, false, memory_order_relaxed);
    return passed;
}

/* Record a fence behind what was launched since the last one. False: the driver makes none. */
static bool fence(struct slot_stream *entry, int place) {
    CUevent *event = &entry->window.events[place];
    if (*event == NULL)
        *event = event_make(entry->registered.context, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC);
    if (*event == NULL || DRIVER(cuEventRecord)(*event, entry->registered.stream) != CUDA_SUCCESS)
        return false;
    entry->window.sizes[place] = entry->window.count;
    entry->window.unfinished += entry->window.count;
    entry->window.begun_at[place] = entry->window.fenced_at;
    entry->window.fenced_at = sys_now();
    return true;
}

/* Wait for the first of two unfinished windows (Q1). */
static void wait_older(const struct gate *gate, struct slot *slot, struct slot_stream *entry) {
    bool waited;
    entry->window.skipped = false;
    if (wait_for(gate, slot, entry, &waited)) {
        adapt(slot, entry, waited, sys_now());
        CUevent older = entry->window.events[0];
        entry->window.events[0] = entry->window.events[1];
        entry->window.events[1] = older;
        entry->window.unfinished -= least(entry->window.unfinished, entry->window.sizes[0]);
        entry->window.sizes[0] = entry->window.sizes[1];
        entry->window.begun_at[0] = entry->window.begun_at[1];
        entry->window.free_launches = 0;
    } else if (entry->window.free_launches > 0) {
        entry->window.size = 1;
    }
}

void meter_launched(const struct gate *gate, struct slot *slot, struct slot_stream *entry) {
    if (entry->window.free_left > 0) {
        entry->window.free_left--;
        return;
    }
    if (++entry->window.count < entry->window.quota)
        return;
    CUstreamCaptureMode mode = own_calls_begin();
    if (entry->window.skipped)
        wait_older(gate, slot, entry);
    if (fence(entry, entry->window.fences)) {
        expect(slot, entry, entry->window.fenced_at);
        if (entry->window.fences == 0)
            entry->window.fences = 1;
        else if (plan(gate, entry, entry->window.fenced_at)) /* its thread is free until it launches again */
            entry->window.skipped = true;
        else
            wait_older(gate, slot, entry);
        plan(gate, entry, sys_now());
    }
    entry->window.count = 0;
    own_calls_end(mode);
}

uint64_t meter_expected_end(const struct gate *gate) {
    uint32_t count = atomic_load(&gate->slot_count);
    uint64_t end = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t ends = atomic_load_explicit(&gate->slots[i].ends_at, memory_order_relaxed);
        end = ends > end ? ends : end;
    }
    return end;
}
