/* Fast path of the gate, inlined into the wrapped launches. It applies if the gate is open, and the thread has launched
 * into the stream since the gate word last changed.
 *
 * Guarantee: G2 of gate.h. benchmarks/hook_overhead.py measures it.
 */
#ifndef SHAREPOD_FASTPATH_H
#define SHAREPOD_FASTPATH_H

#include "driver/entries.h"
#include "driver/own_calls.h"
#include "time/gate/gate.h"
#include "time/streams.h"

#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

/* Forces inlining: a compiler does not inline a function with many callers. A call would add 2 ns to a launch. */
#define FAST static inline __attribute__((always_inline))

/* Order the store to the slot before the load of the gate word (G3, gate.h). */
FAST void gate_order(const struct gate *gate) {
    if (UNLIKELY(atomic_load_explicit(&gate->no_membarrier, memory_order_relaxed)))
        atomic_thread_fence(memory_order_seq_cst);
    else
        atomic_signal_fence(memory_order_seq_cst);
}

/* Return the key of a stream in the thread's table (remembered.h). The key of a default stream consists of its name
 * (see stream_named) and, if several contexts may exist, the current context. The key of another stream is its handle.
 */
FAST uint64_t gate_key(const struct gate *gate, CUstream stream, bool per_thread) {
    if (LIKELY(!stream_is_default(stream)))
        return remembered_key(stream, NULL);
    CUcontext context = NULL;
    if (UNLIKELY(atomic_load_explicit(&gate->contexts, memory_order_relaxed) != CONTEXTS_ONE))
        DRIVER(cuCtxGetCurrent)(&context);
    return remembered_key(stream_named(stream, per_thread), context);
}

/* Enter the gate. Return the thread's queue on the stream: the thread is now inside a launch, and must call
 * gate_leave_fast. Return NULL if the fast path does not apply; the thread has then not entered. */
FAST struct queue *gate_enter_fast(const struct gate *gate, struct slot *slot, CUstream stream, bool per_thread) {
    uint64_t key = gate_key(gate, stream, per_thread);
    uint64_t sequence = atomic_load_explicit(&slot->sequence, memory_order_relaxed);
    if (UNLIKELY(sequence & 1))
        return NULL;
    atomic_store_explicit(&slot->sequence, sequence + 1, memory_order_relaxed);
    gate_order(gate);
    uint32_t word = atomic_load_explicit(&gate->word, memory_order_acquire);
    struct queue *queue = remembered_find(&slot->remembered, key);
    if (LIKELY(queue != NULL && atomic_load_explicit(&queue->word, memory_order_relaxed) == word &&
               !gate_barred(gate, word)))
        return queue; /* the gate is open, because a queue is only registered under the word of an open gate */
    atomic_store_explicit(&slot->sequence, sequence, memory_order_release);
    return NULL;
}

/* Leave the gate without a launch. */
FAST void gate_retreat_fast(struct slot *slot) {
    uint64_t sequence = atomic_load_explicit(&slot->sequence, memory_order_relaxed);
    atomic_store_explicit(&slot->sequence, sequence - 1, memory_order_release);
}

/* Count a launch. Call this before leaving the gate: the drain compares the count with the count at the last fence, to
 * see whether a fence is behind the last launch. Return true if a fence is due. */
FAST bool gate_count(struct queue *queue) {
    uint64_t launched = atomic_load_explicit(&queue->launched, memory_order_relaxed) + 1;
    atomic_store_explicit(&queue->launched, launched, memory_order_relaxed);
    return launched >= queue->due;
}

/* Leave the gate after a launch. `queue` NULL: the launch is not counted. Return whether a fence is due; meter_launched
 * must then follow. */
FAST bool gate_leave_fast(struct slot *slot, struct queue *queue) {
    bool due = queue != NULL && gate_count(queue);
    uint64_t sequence = atomic_load_explicit(&slot->sequence, memory_order_relaxed);
    atomic_store_explicit(&slot->sequence, sequence + 1, memory_order_release);
    return UNLIKELY(due);
}

#endif
