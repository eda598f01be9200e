/* See meter.h.
 *
 * An event is recorded behind every window of launches, and the thread waits for the event before: at most two windows
 * are unfinished. A window grows to 64 launches while it takes less than 2 ms and shrinks to one launch while it takes
 * more than 5. Less would let the GPU run dry whenever the thread is late to wake up.
 *
 * From the fences it is learned how long a launch occupies the GPU, and so when what is launched will have ended. A
 * launch that would begin after the end of the quantum waits for the next one: what the gate leaves when it closes is
 * less than one launch of each stream, and the word of its end, by which the next holder is granted, comes true.
 *
 * The wait has bounds: a kernel may wait for what this very thread does next. It ends with the opening, after which
 * nothing passes the gate anyway, and after PATIENCE: then one launch may pass before the next wait, after another wait
 * in vain two, then four. A queue that was filled before it was metered stays as it is meanwhile.
 */
#include "time/meter.h"

#include "base/sys.h"
#include "driver/entries.h"
#include "driver/own_calls.h"

enum { WINDOW_MOST = 64 };
#define PATIENCE SYS_SECOND /* most kernels are shorter, and it is learned how long they take */
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

/* How many launches more begin before the quantum ends. */
static uint64_t fitting(const struct gate *gate, const struct slot_stream *entry, uint64_t now) {
    uint64_t deadline = atomic_load(&gate->deadline), each = entry->each, begins = most(entry->ends, now);
    if (deadline == SYS_NEVER || each == 0)
        return WINDOW_MOST;
    uint64_t left = deadline > begins ? deadline - begins : 0, margin = least(each / 16, MARGIN);
    return left > margin ? (left - margin + each - 1) / each : 0;
}

/* After a fence, or when an opening begins: how many launches pass until the next fence. True: none. */
static bool plan(const struct gate *gate, struct slot_stream *entry, uint64_t now) {
    uint64_t fits = fitting(gate, entry, now);
    entry->quota = (uint16_t)least(entry->window, fits > 0 ? fits : 1);
    entry->full = fits == 0 && entry->allowed == 0;
    if (entry->full)
        entry->word = 0; /* the next launch looks whether it is so still */
    return entry->full;
}

/* `sample`: how long a launch took, at most; `exact`: no less either. */
static void learn(struct slot_stream *entry, uint64_t sample, bool exact) {
    if (entry->each == 0)
        entry->each = sample;
    else if (exact)
        entry->each = (entry->each + sample) / 2;
    else
        entry->each = least(entry->each, sample);
    entry->taught = true;
}

void meter_begin(struct gate *gate, struct slot_stream *entry) {
    uint32_t opening = atomic_load(&gate->next_closing);
    if (!entry->metered || entry->opening == opening)
        return;
    uint64_t now = sys_now(), drained = atomic_load(&gate->drained);
    if (entry->bound && entry->unfinished > 0 && drained > entry->waited) {
        uint64_t begun = entry->late ? entry->begun[0] : entry->waited;
        learn(entry, (drained - begun) / entry->unfinished, !entry->late && !entry->taught);
    }
    entry->opening = opening;
    entry->count = entry->fences = 0;
    entry->unfinished = 0;
    entry->skipped = entry->bound = entry->taught = entry->exact = entry->late = false;
    entry->waited = entry->fenced = entry->ends = now;
    plan(gate, entry, now);
    entry->full = false;
}

bool meter_holds_back(struct gate *gate, struct slot_stream *entry) {
    if (!entry->full || entry->opening != atomic_load(&gate->next_closing))
        return false;
    entry->bound = plan(gate, entry, sys_now());
    return entry->bound;
}

/* When the last of the thread's streams is expected to end. */
static void foretell(struct slot *slot, const struct slot_stream *entry) {
    uint64_t ends = entry->ends;
    for (int i = 0; i < SLOT_STREAMS; i++)
        if (slot->streams[i].opening == entry->opening)
            ends = most(ends, slot->streams[i].ends);
    atomic_store_explicit(&slot->ends, ends, memory_order_relaxed);
}

/* A window has finished, and one is left unfinished. `waited`: the thread had to wait for that. */
static void adapt(struct slot *slot, struct slot_stream *entry, bool waited, uint64_t now) {
    uint64_t full = (now - entry->waited) * entry->window / entry->sizes[0];
    if (waited && entry->exact)
        learn(entry, (now - entry->waited) / entry->sizes[0], true);
    else if (waited || entry->each != 0)
        learn(entry, (now - entry->begun[0]) / entry->sizes[0], false);
    if (waited)
        full = entry->each * entry->window;
    while (full > WINDOW_LONG && entry->window > 1) {
        entry->window /= 2;
        full /= 2;
    }
    if (full < WINDOW_SHORT && entry->window < WINDOW_MOST)
        entry->window *= 2;
    entry->waited = now;
    entry->exact = waited;
    entry->late = !waited;
    uint64_t behind = now + entry->each * entry->sizes[1];
    entry->ends = waited ? behind : least(entry->ends, behind);
    foretell(slot, entry);
    entry->ahead = least(entry->ahead, now + entry->last * entry->sizes[1]);
}

/* One more window is unfinished, behind those that are already. */
static void expect(struct slot *slot, struct slot_stream *entry, uint64_t now) {
    entry->ends = most(entry->ends, now) + entry->each * entry->count;
    foretell(slot, entry);
}

/* Whether the work before the older event has finished; not so if the wait reached one of its bounds. `waited`: it had
 * not at first. */
static bool wait_for(const struct gate *gate, struct slot *slot, struct slot_stream *entry, bool *waited) {
    CUevent event = entry->events[0];
    *waited = DRIVER(cuEventQuery)(event) == CUDA_ERROR_NOT_READY;
    if (!*waited)
        return true;
    bool passed = false;
    atomic_store_explicit(&slot->fenced, true, memory_order_relaxed);
    uint64_t begun = sys_now(), since = 0, behind = entry->each * entry->sizes[1],
             due = entry->ends > begun + behind ? entry->ends - behind : begun;
    do {
        if (since > PATIENCE)
            entry->spare = entry->allowed = entry->allowed ? least(entry->allowed * 2ull, UINT16_MAX) : 1;
        entry->bound = !(atomic_load(&gate->word) & GATE_OPEN);
        if (since > PATIENCE || entry->bound)
            break;
        uint64_t now = begun + since, off = now > due ? now - due : due - now;
        sys_sleep(off / 8 < POLL_LEAST ? POLL_LEAST : least(off / 8, POLL_MOST));
        since = sys_now() - begun;
        passed = DRIVER(cuEventQuery)(event) != CUDA_ERROR_NOT_READY;
    } while (!passed);
    atomic_store_explicit(&slot->fenced, false, memory_order_relaxed);
    return passed;
}

/* Behind what was launched since the last one. False: there is none. */
static bool fence(struct slot_stream *entry, int place) {
    CUevent *event = &entry->events[place];
    if (*event == NULL)
        *event = event_make(entry->context, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC);
    if (*event == NULL || DRIVER(cuEventRecord)(*event, entry->stream) != CUDA_SUCCESS)
        return false;
    entry->sizes[place] = entry->count;
    entry->unfinished += entry->count;
    entry->begun[place] = entry->fenced;
    entry->fenced = sys_now();
    return true;
}

/* Two windows are unfinished: waits for the first. */
static void wait_older(const struct gate *gate, struct slot *slot, struct slot_stream *entry) {
    bool waited;
    entry->skipped = false;
    if (wait_for(gate, slot, entry, &waited)) {
        adapt(slot, entry, waited, sys_now());
        CUevent older = entry->events[0];
        entry->events[0] = entry->events[1];
        entry->events[1] = older;
        entry->unfinished -= least(entry->unfinished, entry->sizes[0]);
        entry->sizes[0] = entry->sizes[1];
        entry->begun[0] = entry->begun[1];
        entry->allowed = 0;
    } else if (entry->allowed > 0) {
        entry->window = 1;
    }
}

void meter_launched(const struct gate *gate, struct slot *slot, struct slot_stream *entry) {
    if (entry->spare > 0) {
        entry->spare--;
        return;
    }
    if (++entry->count < entry->quota)
        return;
    CUstreamCaptureMode mode = own_calls_begin();
    if (entry->skipped)
        wait_older(gate, slot, entry);
    if (fence(entry, entry->fences)) {
        expect(slot, entry, entry->fenced);
        if (entry->fences == 0)
            entry->fences = 1;
        else if (plan(gate, entry, entry->fenced)) /* its thread is free until it launches again */
            entry->skipped = true;
        else
            wait_older(gate, slot, entry);
        plan(gate, entry, sys_now());
    }
    entry->count = 0;
    own_calls_end(mode);
}

uint64_t meter_expected_end(const struct gate *gate) {
    uint32_t count = atomic_load(&gate->slot_count);
    uint64_t end = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t ends = atomic_load_explicit(&gate->slots[i].ends, memory_order_relaxed);
        end = ends > end ? ends : end;
    }
    return end;
}
