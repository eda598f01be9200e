/* Bounded queue of a thread on a stream. An event (fence) is recorded after every window of launches, and the thread
 * waits for the fence before it. So at most two windows are unfinished (Q1). From the times at which fences pass,
 * pace.c estimates how long a launch occupies the GPU, and when the launched work ends.
 *
 * A queue is wide while the tenant holds the GPU alone. A wide queue does not wait for fences behind a wait of the
 * program (Q6), because that wait may last until this thread continues. When another tenant connects, the queue becomes
 * narrow with the next launch; earlier launches stay in it.
 *
 * A wait for a fence ends at the latest after PATIENCE (Q3), or when the gate closes, because no launch passes then.
 */
#include "time/queue/meter.h"

#include "base/sys.h"
#include "driver/entries.h"
#include "driver/own_calls.h"
#include "time/drain.h"
#include "time/gate/fastpath.h"
#include "time/streams.h"
#include "time/waits.h"

#define PATIENCE SYS_SECOND /* ns, longest wait for a fence: longer than most kernels */
/* ns for which the thread still waits for a fence that is overdue, if the fence is behind a wait of the program and the
 * queue is not wide: as long as the longest window. While the duration of launches is unknown: a quarter of a quantum.
 */
#define HELD_PATIENCE (5 * SYS_MS)
#define HELD_PATIENCE_UNKNOWN (25 * SYS_MS)
#define POLL_LEAST (20 * 1000ull)
#define POLL_MOST SYS_MS

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static uint64_t deadline_of(const struct gate *gate) {
    return atomic_load(&gate->deadline);
}

/* Count the launches since the last call in the model (pace_launched). Return true if a fence is due. */
static bool report(struct queue *queue) {
    uint64_t launched = atomic_load_explicit(&queue->launched, memory_order_relaxed), before = queue->reported;
    queue->reported = launched;
    return pace_launched(&queue->pace, (uint32_t)(launched - before));
}

/* Return true if a fence must follow each launch: the stream is a per-thread default stream, and the driver has no
 * event for all work of a context (before CUDA 12.5). */
static bool fences_each(const struct queue *queue) {
    return queue->stream == CU_STREAM_PER_THREAD && !HAS(cuCtxRecordEvent);
}

/* Set queue->due: the launch count at which the launching thread calls meter_launched next. */
static void set_due(struct queue *queue) {
    queue->due = queue->reported + (fences_each(queue) ? 1 : pace_passing(&queue->pace));
}

/* Store this queue in slot->recent, from which `foretell` predicts when the thread's work ends. If it replaces another
 * queue of this opening, keep that queue's expected end in forgotten_end. */
static void look_at(struct slot *slot, struct queue *queue) {
    struct queue **place = &slot->recent[hash_of((uintptr_t)queue, 0) % SLOT_RECENT];
    const struct queue *other = *place;
    if (other != NULL && other != queue && other->opening == queue->opening &&
        other->pace.estimate.ends_at > slot->forgotten_end)
        slot->forgotten_end = other->pace.estimate.ends_at;
    *place = queue;
}

void meter_begin(struct gate *gate, struct streams *streams, struct queue *queue, uint32_t word) {
    uint32_t opening = atomic_load(&gate->next_closing);
    bool wide = (word & GATE_METERED) == 0;
    if (queue == NULL || (queue->opening == opening && queue->pace.window.wide == wide))
        return;
    report(queue);
    pace_others(&queue->pace, gate_co_runs(gate));
    pace_widen(&queue->pace, wide);
    pace_keep_short(&queue->pace, atomic_load(&gate->keeps_short));
    uint64_t drained = atomic_load(&gate->drained);
    if (queue->opening == opening)
        pace_plan(&queue->pace, sys_now(), deadline_of(gate));
    else if (pace_undrained(&queue->pace, drained) && !drain_over(streams, queue))
        pace_carry(&queue->pace, sys_now(), deadline_of(gate));
    else
        pace_open(&queue->pace, sys_now(), deadline_of(gate),
                  (struct pace_look){atomic_load(&gate->undrained), drained});
    queue->opening = opening;
    set_due(queue);
}

bool meter_is_early(struct gate *gate, struct slot *slot, struct queue *queue) {
    if (queue == NULL || queue->pace.window.wide || queue->opening != atomic_load(&gate->next_closing))
        return false;
    report(queue);
    look_at(slot, queue);
    pace_keep_short(&queue->pace, atomic_load(&gate->keeps_short));
    uint64_t now = sys_now();
    return pace_next_launch(&queue->pace, now) > now;
}

/* Return true if the work before an event of the queue has finished, or the event's context has ended. */
static bool passed(struct queue *queue, CUevent event) {
    if (!streams_call(queue))
        return true;
    CUstreamCaptureMode mode = own_calls_begin();
    bool over = DRIVER(cuEventQuery)(event) != CUDA_ERROR_NOT_READY;
    own_calls_end(mode);
    streams_called(queue);
    return over;
}

/* Checks at intervals whether all launched work has ended earlier than expected. */
void meter_wait_due(const struct gate *gate, struct slot *slot, struct queue *queue) {
    atomic_store_explicit(&slot->waits_due, true, memory_order_relaxed);
    for (uint64_t now = sys_now(), due; atomic_load(&gate->word) & GATE_OPEN; now = sys_now()) {
        due = pace_next_launch(&queue->pace, now);
        if (due <= now)
            break;
        if (passed(queue, atomic_load(&queue->last)))
            pace_ran_dry(&queue->pace, now);
        else
            sys_sleep(due - now < POLL_MOST ? due - now : POLL_MOST);
    }
    atomic_store_explicit(&slot->waits_due, false, memory_order_relaxed);
}

bool meter_holds_back(struct gate *gate, struct queue *queue) {
    return queue != NULL && queue->opening == atomic_load(&gate->next_closing) && queue->pace.window.full &&
           pace_holds_back(&queue->pace, sys_now(), deadline_of(gate));
}

/* Return whether the duration of the unfinished work is still unknown. */
static bool unknown(const struct queue *queue) {
    return queue->pace.queue.unfinished > 0 && queue->pace.estimate.launch_ns == 0;
}

/* Store in the slot, for the hook thread, when the last work of this thread is expected to end. */
static void foretell(struct slot *slot, const struct queue *queue) {
    if (slot->foretold != queue->opening)
        slot->forgotten_end = 0;
    slot->foretold = queue->opening;
    uint64_t ends =
        slot->forgotten_end > queue->pace.estimate.ends_at ? slot->forgotten_end : queue->pace.estimate.ends_at;
    bool blind = unknown(queue);
    for (int i = 0; i < SLOT_RECENT; i++) {
        const struct queue *other = slot->recent[i];
        if (other == NULL || other->opening != queue->opening)
            continue;
        blind |= unknown(other);
        if (other->pace.estimate.ends_at > ends)
            ends = other->pace.estimate.ends_at;
    }
    atomic_store_explicit(&slot->unknown, blind ? queue->opening : 0, memory_order_relaxed);
    atomic_store_explicit(&slot->ends_at, ends, memory_order_relaxed);
}

/* Return true if the older fence is behind a wait of the program that is not known to be over (Q6). */
static bool held(const struct queue *queue) {
    return queue->places[0] > atomic_load(&queue->held_after);
}

/* Return for how many ns the thread still waits for an overdue fence of that kind, in a queue that is not wide. */
static uint64_t held_patience(const struct pace *pace) {
    return pace->estimate.launch_ns == 0 ? HELD_PATIENCE_UNKNOWN : HELD_PATIENCE;
}

/* Return whether so many launches are expected to take at most two windows, or their duration is unknown. */
static bool short_enough(const struct queue *queue, uint64_t launches) {
    return queue->pace.estimate.launch_ns * launches <= PACE_FENCES * PACE_WIDE_LONG;
}

/* Return whether the launches that are not known to have finished are short enough. */
static bool unfinished_short(const struct queue *queue) {
    return short_enough(queue, atomic_load_explicit(&queue->launched, memory_order_relaxed) - queue->passed);
}

/* Record that the older fence has passed. Waits of the program before that fence are therefore over. */
static void note_passed(struct queue *queue) {
    uint64_t place = queue->places[0], after = atomic_load(&queue->held_after);
    queue->passed = place;
    queue->places[0] = queue->places[1];
    if (after == NOT_HELD || place <= after)
        return;
    queue->held_long = false;
    atomic_store(&queue->held_after, place > atomic_load(&queue->held_again) ? NOT_HELD : place);
}

/* Wait for the older fence, from the time `begun` on. The wait may end without success. Return the present time. */
static uint64_t wait_older(const struct gate *gate, struct slot *slot, struct queue *queue, uint64_t begun) {
    CUevent event = queue->events[0];
    uint64_t since = 0, before = 0, due = pace_due(&queue->pace, begun), patience = PATIENCE;
    bool over = passed(queue, event), waited = !over, closed = false, behind = queue->pace.window.wide && held(queue);
    if (waited && behind) {
        if (queue->held_long || unfinished_short(queue)) {
            pace_let_pass(&queue->pace);
            return begun;
        }
        patience = least(due - begun + PACE_WIDE_LONG, PATIENCE);
    } else if (waited && held(queue) && unfinished_short(queue)) {
        patience = least(due - begun + held_patience(&queue->pace), PATIENCE);
    }
    if (waited)
        atomic_store_explicit(&slot->waits_for_fence, true, memory_order_relaxed);
    while (!over && since <= patience && !(closed = !(atomic_load(&gate->word) & GATE_OPEN))) {
        uint64_t now = begun + since, off = now > due ? now - due : due - now;
        before = now;
        sys_sleep(off / 8 < POLL_LEAST ? POLL_LEAST : least(off / 8, POLL_MOST));
        since = sys_now() - begun;
        over = passed(queue, event);
    }
    if (waited)
        atomic_store_explicit(&slot->waits_for_fence, false, memory_order_relaxed);
    if (!over && behind && !closed) {
        queue->held_long = true;
        pace_let_pass(&queue->pace);
        return begun + since;
    }
    if (!over) {
        pace_gave_up(&queue->pace, closed);
        return begun + since;
    }
    uint64_t now = sys_now(); /* read again, because the query took time */
    pace_others(&queue->pace, gate_co_runs(gate));
    pace_passed(&queue->pace, (struct pace_look){behind ? 0 : before, now});
    note_passed(queue);
    queue->events[0] = queue->events[1];
    queue->events[1] = event;
    foretell(slot, queue);
    return now;
}

/* Record an event behind the thread's launches into the stream. Return false if the driver refuses, or the stream has
 * ended. */
static bool record(struct queue *queue, CUevent *event) {
    if (!streams_call(queue))
        return false;
    CUstreamCaptureMode mode = own_record_begin();
    if (*event == NULL)
        *event = event_make(queue->context, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC);
    bool recorded = *event != NULL && DRIVER(cuEventRecord)(*event, queue->stream) == CUDA_SUCCESS;
    own_calls_end(mode);
    streams_called(queue);
    if (!recorded)
        return false;
    atomic_store_explicit(&queue->last, *event, memory_order_release);
    atomic_store_explicit(&queue->fenced, atomic_load_explicit(&queue->launched, memory_order_relaxed),
                          memory_order_release);
    return true;
}

/* Return true if the last fence is behind a wait of the program in a wide queue, and has not passed. */
static bool fenced_behind_wait(struct queue *queue) {
    int last = queue->pace.queue.fences - 1;
    return last >= 0 && queue->pace.window.wide && queue->places[last] > atomic_load(&queue->held_after) &&
           !passed(queue, queue->events[last]);
}

/* If the `behind` launches behind a wait of the program are expected to take two windows or more, wait for the end of
 * that wait. Stop when the gate closes, or after PATIENCE; then do not wait for the same wait again. */
static void await_wait(const struct gate *gate, struct streams *streams, struct slot *slot, struct queue *queue,
                       uint64_t behind) {
    if (queue->held_long || short_enough(queue, behind))
        return;
    atomic_store_explicit(&slot->waits_for_fence, true, memory_order_relaxed);
    for (uint64_t until = sys_now() + PATIENCE; !queue->held_long && atomic_load(&gate->word) & GATE_OPEN;) {
        if (!waits_block(streams, queue, NULL))
            break;
        queue->held_long = sys_now() >= until;
        sys_sleep(POLL_MOST);
    }
    atomic_store_explicit(&slot->waits_for_fence, false, memory_order_relaxed);
}

/* End a window of launches: 1. wait for the older fence, if that wait was postponed; 2. record a new fence; 3. wait for
 * the older fence; 4. plan the next window. Behind a wait of the program only one fence is recorded, because the
 * program may fill the stream, and each fence would displace a launch. */
static void fence(const struct gate *gate, struct streams *streams, struct slot *slot, struct queue *queue) {
    struct pace *pace = &queue->pace;
    if (pace->queue.put_off)
        wait_older(gate, slot, queue, sys_now());
    uint64_t behind = 0;
    if (waits_block(streams, queue, &behind)) {
        await_wait(gate, streams, slot, queue, behind);
        pace_let_pass(pace);
        return;
    }
    uint8_t place = pace->queue.fences < PACE_FENCES ? pace->queue.fences : PACE_FENCES - 1;
    if (fenced_behind_wait(queue)) {
        if (pace->queue.fences == PACE_FENCES)
            pace_plan(pace, wait_older(gate, slot, queue, sys_now()), deadline_of(gate));
        pace_let_pass(pace);
        return;
    }
    if (!record(queue, &queue->events[place])) {
        pace_unfenced(pace);
        return;
    }
    queue->places[place] = atomic_load_explicit(&queue->launched, memory_order_relaxed);
    uint64_t now = sys_now();
    bool waits = pace_fenced(pace, now, deadline_of(gate));
    foretell(slot, queue);
    if (waits)
        pace_plan(pace, wait_older(gate, slot, queue, now), deadline_of(gate));
}

/* If the last launches of a queue have no fence behind them, record one, unless they are behind a wait of the program.
 */
static void fence_rest(struct streams *streams, struct queue *queue) {
    if (atomic_load(&queue->fenced) != atomic_load(&queue->launched) && !waits_block(streams, queue, NULL))
        record(queue, &queue->tail);
}

void meter_launched(const struct gate *gate, struct streams *streams, struct slot *slot, struct queue *queue) {
    bool due =
        report(queue) && !atomic_load_explicit(&gate->exits, memory_order_relaxed); /* P4: nothing is unfinished */
    look_at(slot, queue);
    if (due)
        fence(gate, streams, slot, queue);
    if (fences_each(queue))
        fence_rest(streams, queue);
    set_due(queue);
    if (queue->pace.window.full || atomic_load_explicit(&gate->keeps_short, memory_order_relaxed))
        atomic_store_explicit(&queue->word, 0, memory_order_relaxed); /* the next launch checks whether it must wait */
}

/* Return true if the gate is open and the grant is not metered: no other tenant is connected. */
static bool alone(const struct gate *gate) {
    return (atomic_load(&gate->word) & (GATE_OPEN | GATE_METERED)) == GATE_OPEN;
}

/* Return the thread's queue on the stream with this name, a default stream of this context; NULL: there is none.
 * `context` NULL: only one context exists. */
static struct queue *queue_of(struct streams *streams, const struct slot *slot, CUstream named, CUcontext context) {
    struct queue *queue = remembered_find(&slot->remembered, remembered_key(named, context));
    if (queue == NULL && context != NULL) /* the key was stored while only one context existed */
        queue = remembered_find(&slot->remembered, remembered_key(named, NULL));
    if (queue != NULL && context != NULL && queue->context != context)
        queue = NULL;
    if (queue == NULL && slot->remembered.lost)
        queue = streams_queue(streams, slot, named, context);
    return queue;
}

/* Record a fence behind the thread's launches into this stream, before its next call puts ungated work into the stream.
 */
static void fence_stream(struct streams *streams, const struct slot *slot, CUstream named, CUcontext context) {
    struct queue *queue = queue_of(streams, slot, named, context);
    if (queue != NULL)
        fence_rest(streams, queue);
}

/* Record a fence behind the launches into the thread's per-thread default stream. Record none if a wait of the program
 * may be unfinished there: the stream may be full, and this thread may have to end that wait. */
static void fence_own(struct streams *streams, const struct slot *slot, CUcontext context) {
    struct queue *queue = queue_of(streams, slot, CU_STREAM_PER_THREAD, context);
    if (queue != NULL && atomic_load(&queue->held_after) == NOT_HELD)
        fence_rest(streams, queue);
}

void meter_before_wait(const struct gate *gate, struct streams *streams, const struct slot *slot) {
    CUcontext current = NULL;
    if (slot->queues == NULL || atomic_load(&gate->captures) > 0)
        return;
    if (atomic_load(&gate->contexts) != CONTEXTS_ONE)
        DRIVER(cuCtxGetCurrent)(&current);
    fence_own(streams, slot, current);
}

void meter_before_ungated(const struct gate *gate, struct streams *streams, struct slot *slot, CUstream stream,
                          bool per_thread) {
    CUstream named = stream_named(stream, per_thread);
    CUcontext current = NULL; /* only one context exists */
    bool captures = atomic_load(&gate->captures) > 0;
    if (alone(gate) || (slot != NULL && atomic_load_explicit(&slot->sequence, memory_order_relaxed) & 1))
        return; /* no launch was metered, or this thread is inside a launch */
    if (captures && (stream_is_default(named) || stream_is_capturing(stream, per_thread)))
        return; /* recording an event might disturb a capture (R3, streams.h) */
    if (atomic_load(&gate->contexts) != CONTEXTS_ONE)
        DRIVER(cuCtxGetCurrent)(&current);
    if (slot != NULL && slot->queues != NULL) {
        if (named == CU_STREAM_LEGACY)
            fence_stream(streams, slot, CU_STREAM_LEGACY, current);
        if (!captures && named == CU_STREAM_PER_THREAD)
            fence_stream(streams, slot, named, current);
        else if (!captures)
            fence_own(streams, slot, current);
        if (!stream_is_default(named))
            fence_stream(streams, slot, named, NULL);
    }
    drain_before_ungated(
        streams, named,
        current); /* launches of other threads, and launches into streams that wait for the legacy stream */
}

void meter_before_ungated_context(const struct gate *gate, struct streams *streams, CUcontext context) {
    if (!alone(gate) && atomic_load(&gate->captures) == 0)
        drain_before_ungated_context(streams, context, true);
}

bool meter_end_unknown(const struct gate *gate) {
    uint32_t count = atomic_load(&gate->slot_count), opening = atomic_load(&gate->next_closing);
    for (uint32_t i = 0; i < count; i++)
        if (atomic_load_explicit(&gate->slots[i].unknown, memory_order_relaxed) == opening)
            return true;
    return false;
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
