/* Entering and leaving the gate where the fast path does not apply; assignment of slots to threads; waiting at the
 * closed gate.
 *
 * A thread marks its slot, then reads the gate word (G3, gate.h). If the gate is closed, the thread clears the mark,
 * records that it waits, and wakes the hook thread. The hook thread then requests the token.
 */
#include "time/gate/passage.h"

#include "base/sys.h"
#include "driver/entries.h"
#include "driver/own_calls.h"
#include "session/session.h"
#include "time/gate/fastpath.h"
#include "time/queue/meter.h"
#include "time/waits.h"

__thread struct slot *passage_slot;

/* Number of slots used so far. A plain variable, because a fork zeroes the gate's count. After a fork without handlers
 * (musl, clone(2)) the thread that forked keeps its slot, so no other thread may get that slot. */
static _Atomic uint32_t slots_seen;

void passage_after_fork(void) {
    passage_slot = NULL;
    atomic_store(&slots_seen, 0);
}

uint32_t passage_slots_seen(void) {
    return atomic_load(&slots_seen);
}

/* In ns. EXIT_PATIENCE: longest wait for the work of a launch while the program exits, as long as the usual grace
 * period. EXIT_POLL: time between two checks. */
#define EXIT_PATIENCE SYS_SECOND
#define EXIT_POLL (100 * 1000ull)

enum {
    CLAIM_LOOKS = 4
}; /* number of slots that a new thread checks for an exited thread: each check is a system call
    */

/* Return the slot of an exited thread, now assigned to this thread. Only the next CLAIM_LOOKS slots are checked; NULL:
 * none of their threads has exited. */
static struct slot *inherit_slot(struct gate *gate, struct streams *streams, int self) {
    uint32_t count = atomic_load(&gate->slot_count);
    for (int look = 0; look < CLAIM_LOOKS && count > 0; look++) {
        struct slot *slot = &gate->slots[atomic_fetch_add(&gate->next_claim, 1) % count];
        int before = atomic_load(&slot->thread);
        if (before == 0 || sys_thread_lives(before) || !atomic_compare_exchange_strong(&slot->thread, &before, self))
            continue;
        uint64_t sequence = atomic_load(&slot->sequence);
        if (sequence & 1)
            atomic_store(&slot->sequence, sequence + 1);
        atomic_store(&slot->waits, 0);
        atomic_store(&slot->waits_for_fence, false);
        atomic_store(&slot->waits_due, false);
        streams_abandon(streams, slot);
        return slot;
    }
    return NULL;
}

/* Return a slot for this thread: its earlier slot, the slot of an exited thread, or an unused slot. NULL: no slot is
 * left. */
static struct slot *claim_slot(struct gate *gate, struct streams *streams) {
    if (passage_slot != NULL && atomic_load(&passage_slot->thread) != 0) /* 0: zeroed by a fork */
        return passage_slot;
    int self = sys_thread_id();
    passage_slot = inherit_slot(gate, streams, self);
    if (passage_slot != NULL)
        return passage_slot;
    uint32_t fresh = atomic_load(&gate->slot_count);
    while (fresh < GATE_SLOTS && !atomic_compare_exchange_weak(&gate->slot_count, &fresh, fresh + 1))
        ;
    if (fresh >= GATE_SLOTS)
        return NULL;
    atomic_store(&gate->slots[fresh].thread, self);
    for (uint32_t seen = atomic_load(&slots_seen);
         seen < fresh + 1 && !atomic_compare_exchange_weak(&slots_seen, &seen, fresh + 1);)
        ;
    return passage_slot = &gate->slots[fresh];
}

/* Wait until the gate is opened. The wait may end early, so the caller must check the gate again. slot->waits stays set
 * until the thread is inside a launch, so that gate_waking reports the thread. */
static void wait_for_turn(struct gate *gate, struct slot *slot) {
    uint32_t closing = atomic_load(&gate->closing), word = atomic_load(&gate->word);
    if (word & GATE_OPEN)
        return;
    if (slot != NULL)
        atomic_store(&slot->waits, closing);
    gate_want(gate, closing);
    if (atomic_load(&gate->closing) == closing) { /* otherwise the gate has been opened, and no wake-up may follow */
        session_wake();
        sys_wait(&gate->word, word, SYS_NEVER);
    }
}

/* Set gate->contexts at the first launch: one context or several. Must precede the first registered stream, whose key
 * depends on it. */
static void count_contexts(struct gate *gate) {
    uint32_t unknown = CONTEXTS_UNKNOWN;
    int devices = 0;
    if (atomic_load(&gate->contexts) == CONTEXTS_UNKNOWN && HAS(cuDeviceGetCount) &&
        DRIVER(cuDeviceGetCount)(&devices) == CUDA_SUCCESS)
        atomic_compare_exchange_strong(&gate->contexts, &unknown, devices == 1 ? CONTEXTS_ONE : CONTEXTS_SEVERAL);
}

/* Record that this thread, which has no slot, is inside a launch. Return its index in shared_threads; SHARED_PLACES:
 * all are in use, and only the count shared_inside has it. */
static int enter_shared(struct gate *gate) {
    int self = sys_thread_id();
    for (int look = 0; look < SHARED_PLACES; look++) {
        int place = (self + look) % SHARED_PLACES, unused = 0;
        if (atomic_compare_exchange_strong(&gate->shared_threads[place], &unused, self))
            return place;
    }
    atomic_fetch_add(&gate->shared_inside, 1);
    return SHARED_PLACES;
}

static void leave_shared(struct gate *gate, int place) {
    if (place < SHARED_PLACES)
        atomic_store(&gate->shared_threads[place], 0);
    else
        atomic_fetch_sub(&gate->shared_inside, 1);
}

/* The fast path does not apply to: a closed gate, an open capture, a stream that is new to this opening, a thread
 * without a slot, and a launch inside a launch. */
struct passage passage_enter(struct gate *gate, struct streams *streams, CUstream stream, bool per_thread) {
    struct passage passage = {.refused = CUDA_SUCCESS};
    count_contexts(gate);
    for (;;) {
        if (atomic_load(&gate->captures) > 0 && stream_is_capturing(stream, per_thread)) {
            if (passage.waited && passage_slot != NULL)
                atomic_store(&passage_slot->waits, 0);
            return passage; /* a capture records the launch, so it does not run */
        }
        struct slot *slot = claim_slot(gate, streams);
        if (slot != NULL && atomic_load_explicit(&slot->sequence, memory_order_relaxed) & 1)
            return passage; /* this thread is inside another launch, whose passage covers this one */
        uint64_t sequence = slot ? atomic_load_explicit(&slot->sequence, memory_order_relaxed) : 0;
        if (slot != NULL)
            atomic_store_explicit(&slot->sequence, sequence + 1, memory_order_relaxed);
        else
            passage.place = enter_shared(gate);
        atomic_thread_fence(memory_order_seq_cst);
        uint32_t word = atomic_load(&gate->word), closing = atomic_load(&gate->next_closing);
        bool open = word & GATE_OPEN, barred = open && gate_barred(gate, word);
        if (open && slot != NULL && passage.waited)
            atomic_store(&slot->waits, 0);
        if (open && !barred) {
            uint64_t deadline = atomic_load(&gate->deadline);
            passage.slot = slot;
            passage.gate = gate;
            passage.streams = streams;
            passage.named = stream_named(stream, per_thread);
            if (!streams_register(streams, gate, slot, passage.named, word, &passage.queue)) {
                passage_abandon(&passage);
                passage.refused = CUDA_ERROR_OUT_OF_MEMORY;
                return passage;
            }
            if (passage.queue != NULL && passage.queue->mark != NULL)
                waits_mark(streams, passage.queue);
            meter_begin(gate, streams, passage.queue, word);
            if (meter_holds_back(gate, passage.queue)) {
                passage_abandon(&passage);
                passage_wait_next(gate, closing, deadline);
                passage.waited = atomic_load(&gate->next_closing) != closing;
                continue;
            }
            if (slot != NULL && meter_is_early(gate, slot, passage.queue)) {
                passage_abandon(&passage);
                meter_wait_due(gate, slot, passage.queue);
                continue;
            }
            if (passage.queue != NULL && atomic_load(&gate->exits))
                atomic_store(&passage.queue->word, 0); /* no launch takes the fast path (P4) */
            return passage;
        }
        if (slot != NULL)
            atomic_store_explicit(&slot->sequence, sequence, memory_order_release);
        else
            leave_shared(gate, passage.place);
        if (slot != NULL)
            meter_before_wait(gate, streams, slot);
        if (barred)
            passage_wait_next(gate, closing, SYS_NEVER);
        else
            wait_for_turn(gate, slot);
        passage.waited = true;
    }
}

void passage_abandon(struct passage *passage) {
    struct gate *gate = passage->gate;
    if (gate == NULL)
        return;
    passage->gate = NULL;
    struct slot *slot = passage->slot;
    if (slot == NULL)
        leave_shared(gate, passage->place);
    else
        atomic_store(&slot->sequence, atomic_load_explicit(&slot->sequence, memory_order_relaxed) - 1);
}

/* The thread records the closing by gate_want, but not in its slot. So gate_waking does not report it, and the token
 * may be returned while it waits. */
void passage_wait_next(struct gate *gate, uint32_t closing, uint64_t deadline) {
    for (;;) {
        uint32_t word = atomic_load(&gate->word);
        if (word == 0 || atomic_load(&gate->next_closing) != closing || atomic_load(&gate->deadline) > deadline)
            return;
        gate_want(gate, closing);
        session_wake();
        sys_wait(&gate->word, word, SYS_NEVER);
    }
}

/* Wait until the stream of the launch has no unfinished work. Do not wait if the stream waits for the program, because
 * perhaps this thread must end that wait. */
static void await_end(const struct passage *passage) {
    CUresult result = CUDA_ERROR_NOT_READY;
    for (uint64_t now = sys_now(), until = now + EXIT_PATIENCE; result == CUDA_ERROR_NOT_READY && now < until;) {
        if (passage->queue != NULL && waits_block(passage->streams, passage->queue, NULL))
            return;
        CUstreamCaptureMode mode = own_calls_begin();
        result = DRIVER(cuStreamQuery)(passage->named);
        own_calls_end(mode);
        if (result == CUDA_ERROR_NOT_READY)
            sys_sleep(EXIT_POLL);
        now = sys_now();
    }
}

void passage_leave(struct passage *passage) {
    struct gate *gate = passage->gate;
    if (gate == NULL)
        return;
    struct slot *slot = passage->slot;
    if (atomic_load_explicit(&gate->exits, memory_order_relaxed) && HAS(cuStreamQuery))
        await_end(passage);
    if (slot == NULL) {
        atomic_fetch_add(&gate->shared_passed, 1);
        leave_shared(gate, passage->place);
        return;
    }
    if (gate_leave_fast(slot, passage->queue))
        meter_launched(gate, passage->streams, slot, passage->queue);
}

bool passage_note(struct gate *gate, struct streams *streams, CUstream stream, bool per_thread) {
    struct queue *none;
    return streams_register(streams, gate, NULL, stream_named(stream, per_thread), atomic_load(&gate->word), &none);
}
