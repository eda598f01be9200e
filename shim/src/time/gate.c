/* See gate.h. */
#include "time/gate.h"

#include <linux/membarrier.h>

#include "driver/entries.h"
#include "time/fastpath.h"

#define SETTLE (5 * SYS_MS)

__thread struct slot *gate_slot;

/* Slots ever used, also before a fork that nobody told us of (musl, a bare clone): the thread that forked goes on with
 * its old slot, so that no other may get that one. Not in wiped memory. */
static _Atomic uint32_t slots_seen;

void gate_after_fork(void) {
    gate_slot = NULL;
    atomic_store(&slots_seen, 0);
}

static long membarrier(int command) {
    return sys_call(SYS_membarrier, command, 0, 0, 0, 0, 0);
}

void gate_prepare(struct gate *gate) {
    atomic_store(&gate->slot_count, atomic_load(&slots_seen));
    atomic_store(&gate->closing, 1);
    gate->fenced = membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) != 0;
}

/* Threads register their streams anew, and those that wait look again. */
static void set_open(struct gate *gate, bool metered, uint64_t deadline) {
    uint32_t word = atomic_load(&gate->word), ends = atomic_load(&gate->closing), open;
    atomic_store(&gate->deadline, deadline);
    do {
        open = ((word & ~(uint32_t)(GATE_STEP - 1)) + GATE_STEP) | GATE_READY | GATE_OPEN | (word & GATE_CAPTURING) |
               (metered ? GATE_METERED : 0);
    } while (!atomic_compare_exchange_weak(&gate->word, &word, open));
    if (atomic_load(&gate->wanted) == ends)
        sys_wake_all(&gate->word);
}

bool gate_wanted(struct gate *gate) {
    return atomic_load(&gate->wanted) == atomic_load(&gate->closing);
}

bool gate_waking(struct gate *gate, bool forget) {
    uint32_t count = atomic_load(&gate->slot_count);
    bool waking = false;
    for (uint32_t i = 0; i < count; i++) {
        struct slot *slot = &gate->slots[i];
        uint32_t waits = atomic_load(&slot->waits);
        waking |= !forget && atomic_load(&slot->fenced) && sys_thread_lives(atomic_load(&slot->thread));
        if (waits == 0)
            continue;
        if (forget || !sys_thread_lives(atomic_load(&slot->thread)))
            atomic_compare_exchange_strong(&slot->waits, &waits, 0);
        else
            waking = true;
    }
    return waking;
}

void gate_open(struct gate *gate, bool metered, uint64_t deadline) {
    uint32_t ends = atomic_load(&gate->closing);
    atomic_store(&gate->next_closing, ends == UINT32_MAX ? 1 : ends + 1); /* who sees the gate open sees this */
    set_open(gate, metered, deadline);
    atomic_store(&gate->closing, atomic_load(&gate->next_closing)); /* who sees this sees the gate open */
}

void gate_prolong(struct gate *gate, bool metered, uint64_t deadline) {
    bool now = (atomic_load(&gate->word) & GATE_METERED) != 0;
    if (now != metered || atomic_load(&gate->deadline) < deadline) {
        uint32_t wanted = atomic_load(&gate->closing);
        bool waited = atomic_compare_exchange_strong(&gate->wanted, &wanted, 0); /* who waits on says so again */
        set_open(gate, metered, deadline);
        if (waited)
            sys_wake_all(&gate->word);
    } else {
        atomic_store(&gate->deadline, deadline);
    }
}

void gate_close(struct gate *gate) {
    atomic_fetch_and(&gate->word, ~(uint32_t)(GATE_OPEN | GATE_METERED));
    if (gate->fenced || membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED) == 0)
        return;
    gate->fenced = true; /* forbidden since the start */
    sys_sleep(SETTLE);   /* for once: launches that began without a fence are seen by then */
}

void gate_set_captures(struct gate *gate, uint32_t captures) {
    atomic_store(&gate->captures, captures);
    if (captures > 0)
        atomic_fetch_or(&gate->word, GATE_CAPTURING);
    else
        atomic_fetch_and(&gate->word, ~(uint32_t)GATE_CAPTURING);
}

void gate_renew(struct gate *gate) {
    if (atomic_load(&gate->word) != 0)
        atomic_fetch_add(&gate->word, GATE_STEP);
}

bool gate_clear(struct gate *gate) {
    uint32_t count = atomic_load(&gate->slot_count);
    bool clear = atomic_load(&gate->shared_inside) == 0;
    for (uint32_t i = 0; i < count; i++) {
        struct slot *slot = &gate->slots[i];
        uint64_t sequence = atomic_load(&slot->sequence);
        if (!(sequence & 1))
            continue;
        if (sys_thread_lives(atomic_load(&slot->thread)))
            clear = false;
        else /* cancelled inside the driver */
            atomic_compare_exchange_strong(&slot->sequence, &sequence, sequence + 1);
    }
    return clear;
}

uint64_t gate_launches(struct gate *gate) {
    uint32_t count = atomic_load(&gate->slot_count);
    uint64_t launches = atomic_load(&gate->shared_passed);
    for (uint32_t i = 0; i < count; i++)
        launches += (atomic_load_explicit(&gate->slots[i].sequence, memory_order_relaxed) + 1) / 2;
    return launches;
}

/* A slot for this thread: its own from before, a fresh one, or one whose thread is gone. NULL: none is left. */
static struct slot *claim_slot(struct gate *gate) {
    if (gate_slot != NULL && atomic_load(&gate_slot->thread) != 0) /* 0: wiped by a fork */
        return gate_slot;
    int self = sys_thread_id(), expected = 0;
    uint32_t fresh = atomic_load(&gate->slot_count);
    while (fresh < GATE_SLOTS && !atomic_compare_exchange_weak(&gate->slot_count, &fresh, fresh + 1))
        ;
    if (fresh < GATE_SLOTS) {
        atomic_store(&gate->slots[fresh].thread, self);
        for (uint32_t seen = atomic_load(&slots_seen);
             seen < fresh + 1 && !atomic_compare_exchange_weak(&slots_seen, &seen, fresh + 1);)
            ;
        return gate_slot = &gate->slots[fresh];
    }
    for (int i = 0; i < GATE_SLOTS; i++) {
        struct slot *slot = &gate->slots[i];
        expected = atomic_load(&slot->thread);
        if (expected == 0 || sys_thread_lives(expected) ||
            !atomic_compare_exchange_strong(&slot->thread, &expected, self))
            continue;
        uint64_t sequence = atomic_load(&slot->sequence);
        if (sequence & 1)
            atomic_store(&slot->sequence, sequence + 1);
        atomic_store(&slot->waits, 0);
        for (int s = 0; s < SLOT_STREAMS; s++)
            slot->streams[s].word = slot->streams[s].fences = 0;
        return gate_slot = slot;
    }
    return gate_slot = NULL;
}

/* Notes that a thread waits for the end of that closing; who comes late does not undo a later one. */
static void want(struct gate *gate, uint32_t closing) {
    uint32_t wanted = atomic_load(&gate->wanted);
    while ((wanted == 0 || (int32_t)(closing - wanted) > 0) &&
           !atomic_compare_exchange_weak(&gate->wanted, &wanted, closing))
        ;
}

static void wait_for_turn(struct process *process, struct slot *slot) {
    struct gate *gate = &process->gate;
    uint32_t closing = atomic_load(&gate->closing), word = atomic_load(&gate->word);
    if (word & GATE_OPEN)
        return;
    if (slot != NULL)
        atomic_store(&slot->waits, closing);
    want(gate, closing);
    if (atomic_load(&gate->closing) == closing) { /* else it was opened since, and nobody may look for who waited */
        session_wake(&process->session);
        sys_wait(&gate->word, word, SYS_NEVER);
    }
    if (slot != NULL)
        atomic_store(&slot->waits, 0);
}

/* With the first launch, before a stream is remembered by it. */
static void count_contexts(struct gate *gate) {
    uint32_t unknown = CONTEXTS_UNKNOWN;
    int devices = 0;
    if (atomic_load(&gate->contexts) == CONTEXTS_UNKNOWN && HAS(cuDeviceGetCount) &&
        DRIVER(cuDeviceGetCount)(&devices) == CUDA_SUCCESS)
        atomic_compare_exchange_strong(&gate->contexts, &unknown, devices == 1 ? CONTEXTS_ONE : CONTEXTS_SEVERAL);
}

/* All that the fast path does not cover: not set up, a capture is open, the gate is closed, the stream is new to this
 * opening, no slot. */
__attribute__((noinline)) struct passage gate_enter(CUstream stream, bool per_thread) {
    struct passage passage = {.refused = process_enter()};
    if (passage.refused != CUDA_SUCCESS)
        return passage;
    struct process *process = the_process;
    struct gate *gate = &process->gate;
    count_contexts(gate);
    for (;;) {
        if (atomic_load(&gate->captures) > 0 && streams_is_capturing(stream, per_thread))
            return passage; /* recorded, not run */
        struct slot *slot = claim_slot(gate);
        if (slot != NULL && atomic_load_explicit(&slot->sequence, memory_order_relaxed) & 1)
            return passage; /* inside a launch of this very thread, whose passage covers this one */
        uint64_t sequence = slot ? atomic_load_explicit(&slot->sequence, memory_order_relaxed) : 0;
        if (slot != NULL)
            atomic_store_explicit(&slot->sequence, sequence + 1, memory_order_relaxed);
        else
            atomic_fetch_add(&gate->shared_inside, 1);
        atomic_thread_fence(memory_order_seq_cst);
        uint32_t word = atomic_load(&gate->word);
        if (word & GATE_OPEN) {
            struct slot_stream unslotted = {0},
                               *entry = slot ? gate_remembered(slot, gate_which(stream, per_thread)) : &unslotted;
            uint32_t closing = atomic_load(&gate->next_closing);
            uint64_t deadline = atomic_load(&gate->deadline);
            passage.slot = slot;
            passage.gated = true;
            passage.stream = slot ? entry : NULL;
            if (slot != NULL && word & GATE_METERED && meter_holds_back(gate, entry)) {
                gate_abandon(&passage);
                gate_wait_next(closing, deadline);
                passage.waited = atomic_load(&gate->next_closing) != closing;
                continue;
            }
            if (!streams_register(&process->streams, streams_named(stream, per_thread), word, entry)) {
                gate_abandon(&passage);
                passage.refused = CUDA_ERROR_OUT_OF_MEMORY;
            }
            meter_begin(gate, entry);
            return passage;
        }
        if (slot != NULL)
            atomic_store_explicit(&slot->sequence, sequence, memory_order_release);
        else
            atomic_fetch_sub(&gate->shared_inside, 1);
        wait_for_turn(process, slot);
        passage.waited = true;
    }
}

struct passage gate_pass(CUstream stream, bool per_thread) {
    struct slot *slot = gate_slot;
    struct slot_stream *entry = gate_enter_fast(slot, stream, per_thread);
    if (LIKELY(entry != NULL))
        return (struct passage){.slot = slot, .stream = entry, .gated = true};
    return gate_enter(stream, per_thread);
}

void gate_abandon(struct passage *passage) {
    if (!passage->gated)
        return;
    passage->gated = false;
    struct slot *slot = passage->slot;
    if (slot == NULL)
        atomic_fetch_sub(&the_process->gate.shared_inside, 1);
    else
        atomic_store(&slot->sequence, atomic_load_explicit(&slot->sequence, memory_order_relaxed) - 1);
}

/* It marks the closing to come, and not its slot: to the holder it is idle. */
void gate_wait_next(uint32_t closing, uint64_t deadline) {
    struct process *process = the_process;
    struct gate *gate = &process->gate;
    for (;;) {
        uint32_t word = atomic_load(&gate->word);
        if (word == 0 || atomic_load(&gate->next_closing) != closing || atomic_load(&gate->deadline) > deadline)
            return;
        want(gate, closing);
        session_wake(&process->session);
        sys_wait(&gate->word, word, SYS_NEVER);
    }
}

void gate_leave(struct passage *passage) {
    if (UNLIKELY(!passage->gated))
        return;
    struct slot *slot = passage->slot;
    struct gate *gate = &the_process->gate;
    if (UNLIKELY(slot == NULL)) {
        atomic_fetch_add(&gate->shared_passed, 1);
        atomic_fetch_sub(&gate->shared_inside, 1);
        return;
    }
    uint64_t sequence = atomic_load_explicit(&slot->sequence, memory_order_relaxed);
    atomic_store_explicit(&slot->sequence, sequence + 1, memory_order_release);
    if (passage->stream->metered)
        meter_launched(slot, passage->stream);
}

bool gate_note(CUstream stream, bool per_thread) {
    struct process *process = the_process;
    struct slot_stream unremembered = {0};
    return streams_register(&process->streams, streams_named(stream, per_thread), atomic_load(&process->gate.word),
                            &unremembered);
}
