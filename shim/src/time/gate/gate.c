/* Gate word, and the hook thread's reads of all slots.
 *
 * To close the gate, the hook thread clears GATE_OPEN and then makes every running thread pass a barrier (membarrier).
 * A thread that has loaded the open word before the barrier has marked its slot even earlier, so gate_clear sees the
 * mark (G3, G1).
 */
#include "time/gate/gate.h"

#include <linux/membarrier.h>

#include "base/sys.h"
#include "driver/own_calls.h"

/* ns after which a store to a slot is visible to other threads, even without a memory fence. */
#define SETTLE (5 * SYS_MS)

static long membarrier(int command) {
    return sys_call(SYS_membarrier, command, 0, 0, 0, 0, 0);
}

void gate_prepare(struct gate *gate, uint32_t slots, const uint64_t *barred, const uint64_t *co_runs) {
    gate->barred = barred;
    gate->co_runs = co_runs;
    atomic_store(&gate->slot_count, slots);
    atomic_store(&gate->closing, 1);
    gate->no_membarrier = membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) != 0;
}

/* Set the word of an opening. Threads then register their streams again, and waiting threads check the gate again (G4).
 */
static void set_open(struct gate *gate, bool metered, uint64_t deadline, uint64_t grant) {
    uint32_t word = atomic_load(&gate->word), ends = atomic_load(&gate->closing), open;
    atomic_store(&gate->deadline, deadline);
    atomic_store(&gate->grant, grant);
    do {
        open = ((word & ~(uint32_t)(GATE_STEP - 1)) + GATE_STEP) | GATE_READY | GATE_OPEN | (word & GATE_CAPTURING) |
               (metered ? GATE_METERED : 0);
    } while (!atomic_compare_exchange_weak(&gate->word, &word, open));
    if (atomic_load(&gate->wanted) == ends)
        sys_wake_all(&gate->word);
}

bool gate_wanted(const struct gate *gate) {
    return atomic_load(&gate->wanted) == atomic_load(&gate->closing);
}

bool gate_waking(struct gate *gate, bool forget) {
    uint32_t count = atomic_load(&gate->slot_count);
    bool waking = false;
    for (uint32_t i = 0; i < count; i++) {
        struct slot *slot = &gate->slots[i];
        uint32_t waits = atomic_load(&slot->waits);
        bool waits_in_launch = (!forget && atomic_load(&slot->waits_for_fence)) || atomic_load(&slot->waits_due);
        waking |= waits_in_launch && sys_thread_lives(atomic_load(&slot->thread));
        if (waits == 0)
            continue;
        if (forget || !sys_thread_lives(atomic_load(&slot->thread)))
            atomic_compare_exchange_strong(&slot->waits, &waits, 0);
        else
            waking = true;
    }
    return waking;
}

void gate_open(struct gate *gate, bool metered, uint64_t deadline, uint64_t grant) {
    uint32_t ends = atomic_load(&gate->closing);
    atomic_store(&gate->next_closing,
                 ends == UINT32_MAX ? 1 : ends + 1); /* a thread that sees the gate open also sees this value */
    set_open(gate, metered, deadline, grant);
    atomic_store(&gate->closing,
                 atomic_load(&gate->next_closing)); /* a thread that sees this value also sees the gate open */
}

void gate_prolong(struct gate *gate, bool metered, uint64_t deadline, uint64_t grant) {
    bool now = (atomic_load(&gate->word) & GATE_METERED) != 0;
    if (now != metered || atomic_load(&gate->deadline) < deadline) {
        uint32_t wanted = atomic_load(&gate->closing);
        bool waited = atomic_compare_exchange_strong(&gate->wanted, &wanted,
                                                     0); /* a thread that still waits calls gate_want again */
        set_open(gate, metered, deadline, grant);
        if (waited)
            sys_wake_all(&gate->word);
    } else {
        atomic_store(&gate->deadline, deadline);
        atomic_store(&gate->grant, grant);
    }
}

void gate_close(struct gate *gate) {
    atomic_fetch_and(&gate->word, ~(uint32_t)(GATE_OPEN | GATE_METERED));
    if (gate->no_membarrier || membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED) == 0)
        return;
    gate->no_membarrier = true; /* membarrier was forbidden after the start of the process */
    sys_sleep(SETTLE);          /* only once: after this sleep, launches without a memory fence are visible */
}

void gate_set_captures(struct gate *gate, uint32_t captures) {
    own_calls_set_captures(captures);
    atomic_store(&gate->captures, captures);
    if (captures > 0)
        atomic_fetch_or(&gate->word, GATE_CAPTURING);
    else
        atomic_fetch_and(&gate->word, ~(uint32_t)GATE_CAPTURING);
}

void gate_exit(struct gate *gate) {
    atomic_store(&gate->exits, true);
    if (atomic_load(&gate->word) != 0)
        atomic_fetch_add(&gate->word, GATE_STEP); /* no launch takes the fast path */
}

bool gate_clear(struct gate *gate) {
    uint32_t count = atomic_load(&gate->slot_count);
    bool clear = atomic_load(&gate->shared_inside) == 0;
    for (int i = 0; i < SHARED_PLACES && count == GATE_SLOTS; i++) {
        int thread = atomic_load(&gate->shared_threads[i]);
        if (thread != 0 && sys_thread_lives(thread))
            clear = false;
        else if (thread != 0)
            atomic_compare_exchange_strong(&gate->shared_threads[i], &thread, 0);
    }
    for (uint32_t i = 0; i < count; i++) {
        struct slot *slot = &gate->slots[i];
        uint64_t sequence = atomic_load(&slot->sequence);
        if (!(sequence & 1))
            continue;
        if (sys_thread_lives(atomic_load(&slot->thread)))
            clear = false;
        else /* the thread was cancelled inside the driver */
            atomic_compare_exchange_strong(&slot->sequence, &sequence, sequence + 1);
    }
    return clear;
}

/* Return the number of launches so far. `begun`: 1: with launches that are being made now; 0: without them. */
static uint64_t count_launches(const struct gate *gate, unsigned begun) {
    uint32_t count = atomic_load(&gate->slot_count);
    uint64_t launches = atomic_load(&gate->shared_passed);
    for (uint32_t i = 0; i < count; i++)
        launches += (atomic_load_explicit(&gate->slots[i].sequence, memory_order_relaxed) + begun) / 2;
    return launches;
}

uint64_t gate_launches(const struct gate *gate) {
    return count_launches(gate, 1);
}

uint64_t gate_finished(const struct gate *gate) {
    return count_launches(gate, 0);
}

void gate_want(struct gate *gate, uint32_t closing) {
    uint32_t wanted = atomic_load(&gate->wanted);
    while ((wanted == 0 || (int32_t)(closing - wanted) > 0) &&
           !atomic_compare_exchange_weak(&gate->wanted, &wanted, closing))
        ;
}
