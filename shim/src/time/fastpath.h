/* The fast path of the gate, inlined into the wrapped launches: the gate is open, and the thread has registered the
 * stream under its present word.
 *
 * Guarantee: G2 of gate.h. Measured: 4 to 7 ns a launch (benchmarks/hook_overhead.py).
 */
#ifndef SHAREPOD_FASTPATH_H
#define SHAREPOD_FASTPATH_H

#include "driver/entries.h"
#include "driver/own_calls.h"
#include "time/gate.h"
#include "time/streams.h"

#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

/* Not left to the compiler, which stops inlining what many wrappers use: a call here costs a launch some 2 ns. */
#define FAST static inline __attribute__((always_inline))

/* Order the store to the slot before the load of the gate word (G3). */
FAST void gate_order(const struct gate *gate) {
    if (UNLIKELY(atomic_load_explicit(&gate->no_membarrier, memory_order_relaxed)))
        atomic_thread_fence(memory_order_seq_cst);
    else
        atomic_signal_fence(memory_order_seq_cst);
}

/* A stream as a thread remembers it: a default stream by its one name and, if there may be several, the current
 * context; others by the handle alone. */
struct which_stream {
    CUstream stream;
    CUcontext context; /* NULL: the handle says it */
};

/* Return how this thread remembers the stream. */
FAST struct which_stream gate_which(const struct gate *gate, CUstream stream, bool per_thread) {
    struct which_stream which = {stream, NULL};
    if (stream_is_default(stream)) {
        which.stream = stream_named(stream, per_thread);
        if (UNLIKELY(atomic_load_explicit(&gate->contexts, memory_order_relaxed) != CONTEXTS_ONE))
            DRIVER(cuCtxGetCurrent)(&which.context);
    }
    return which;
}

/* Return where the thread remembers that stream, or another one that collides with it. */
FAST struct slot_stream *gate_remembered(struct slot *slot, struct which_stream which) {
    uint64_t key = (uint64_t)(uintptr_t)which.stream ^ (uint64_t)(uintptr_t)which.context << 1;
    return &slot->streams[key * 0x9e3779b97f4a7c15ull >> 60]; /* all bits of the key count */
}

/* Enter. Not NULL: inside a launch, and gate_leave_fast is to follow. NULL: nothing has happened. */
FAST struct slot_stream *gate_enter_fast(const struct gate *gate, struct slot *slot, CUstream stream, bool per_thread) {
    struct which_stream which = gate_which(gate, stream, per_thread);
    uint64_t sequence = atomic_load_explicit(&slot->sequence, memory_order_relaxed);
    if (UNLIKELY(sequence & 1))
        return NULL;
    atomic_store_explicit(&slot->sequence, sequence + 1, memory_order_relaxed);
    gate_order(gate);
    uint32_t word = atomic_load_explicit(&gate->word, memory_order_acquire);
    struct slot_stream *entry = gate_remembered(slot, which);
    if (LIKELY((word & GATE_OPEN) && entry->gate_word == word && entry->stream == which.stream &&
               (which.context == NULL || entry->context == which.context) && !gate_barred(gate, word)))
        return entry;
    atomic_store_explicit(&slot->sequence, sequence, memory_order_release);
    return NULL;
}

/* Leave without having launched. */
FAST void gate_retreat_fast(struct slot *slot) {
    uint64_t sequence = atomic_load_explicit(&slot->sequence, memory_order_relaxed);
    atomic_store_explicit(&slot->sequence, sequence - 1, memory_order_release);
}

/* Count a launch, inside the passage: the drain asks whether a fence is behind it. Return whether one is due. */
FAST bool gate_count(struct queue *queue) {
    uint64_t launched = atomic_load_explicit(&queue->launched, memory_order_relaxed) + 1;
    atomic_store_explicit(&queue->launched, launched, memory_order_relaxed);
    return launched >= queue->due;
}

/* Leave after the launch. Return whether its queue is to be looked at: then meter_launched is to follow. */
FAST bool gate_leave_fast(struct slot *slot, const struct slot_stream *entry) {
    struct queue *queue = entry->queue;
    bool due = LIKELY(queue != NULL) && gate_count(queue);
    uint64_t sequence = atomic_load_explicit(&slot->sequence, memory_order_relaxed);
    atomic_store_explicit(&slot->sequence, sequence + 1, memory_order_release);
    return UNLIKELY(due);
}

_Static_assert(SLOT_STREAMS == 16, "gate_remembered takes the highest four bits");

#endif
