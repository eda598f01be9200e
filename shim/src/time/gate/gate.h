/* The gate: one word that decides whether launches may pass, and a slot per thread that shows whether it is inside a
 * launch. This is the hook thread's side; passage.h is the side of the program's threads, fastpath.h their hot path.
 *
 * Guarantees:
 * - G1 no-entry-after-clear: once gate_clear has returned true after gate_close, no thread is inside a launch and none
 *   enters until gate_open. Exception: launches that a stream capture records, which run nothing.
 * - G2 launch-costs-no-shared-write: with the gate open a launch costs one store to the thread's own slot before and
 *   one after, one to its own queue, and a load of the gate word. It takes no lock, no clock and no system call, and
 *   writes no shared cache line. The last launch of a window costs a fence (meter.h).
 * - G3 slot-before-word: a thread's store to its slot is visible before its load of the gate word. G1 rests on it. The
 *   closing thread pays for it, by membarrier; where seccomp forbids that, each launch does, by a full fence.
 * - G4 no-lost-wake-up: a thread that has announced its wait by gate_want is woken by the next opening.
 * - G5 barred: the agent can bar a metered opening while the hook thread has no processor. A later launch waits for the
 *   next opening. Each thread that was inside a launch leaves it.
 */
#ifndef SHAREPOD_GATE_H
#define SHAREPOD_GATE_H

#include <cuda.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "time/gate/remembered.h"

#ifndef SHAREPOD_GATE_SLOTS
#define SHAREPOD_GATE_SLOTS 16384
#endif

/* GATE_SLOTS: threads with a slot of their own; later ones share one, which costs a shared write (not G2). More than
 * most containers allow; a slot takes memory when it is used. SLOT_RECENT: queues whose ends a thread foretells one by
 * one; of the others it knows the latest end. */
enum { GATE_SLOTS = SHAREPOD_GATE_SLOTS, SLOT_RECENT = 16 };

/* The gate word: 0 is "not set up", also the value of a wiped page; else a counter above these bits. Every opening,
 * every change of its terms and gate_exit add GATE_STEP, so that threads register their streams again. */
enum { GATE_READY = 1, GATE_OPEN = 2, GATE_METERED = 4, GATE_CAPTURING = 8, GATE_STEP = 16 };

/* The number of contexts, which decides whether a default stream is always the same one. 0 (unknown, also the value of
 * a wiped page) and SEVERAL mean that the driver must be asked for the current context. ONE: there is one device, and
 * only its primary context was ever requested. If another context exists nevertheless (by graphics calls, which the
 * hook does not wrap), it is noticed at the next opening of the gate. */
enum { CONTEXTS_UNKNOWN, CONTEXTS_ONE, CONTEXTS_SEVERAL };

/* A thread at the gate. In cache lines of its own (G2). */
struct slot {
    struct remembered remembered;      /* its queues, by stream; its end and the next fields are one cache line */
    _Atomic uint64_t sequence;         /* odd: inside a launch; half of it: launches */
    _Atomic int thread;                /* its id; 0: a slot never used, or wiped by a fork */
    _Atomic uint32_t waits;            /* which closing of the gate its thread waits out; 0: none */
    _Atomic bool waits_for_fence;      /* its thread waits for a fence, and launches when that has passed */
    _Atomic bool waits_due;            /* its thread waits until its launch is due: for one kernel at most */
    _Atomic uint32_t unknown;          /* the closing before which it made launches with unknown end; 0: none */
    _Atomic uint64_t ends_at;          /* ns: when the metered work of this thread is expected to end */
    struct queue *queues, *ended;      /* queues of this thread, and those with ended streams; lock of struct streams */
    struct queue *recent[SLOT_RECENT]; /* its queues that were looked at last; of two that share a place one */
    uint64_t forgotten_end;            /* ns: the end that is expected of the others */
    uint32_t foretold;                 /* the opening that it is about */
} __attribute__((aligned(128)));

/* Threads without a slot that can be inside a launch at once and are known by their ids. So a thread that is cancelled
 * there delays no closing. */
enum { SHARED_PLACES = 64 };

#define GATE_NO_GRANT UINT64_MAX /* no agent can bar the opening */

struct gate {
    _Atomic uint32_t word;
    _Atomic uint32_t captures;  /* open stream captures; GATE_CAPTURING means that there are any */
    _Atomic bool exits;         /* the program ends: each launch is waited for by its own thread */
    _Atomic bool no_membarrier; /* forbidden: each launch takes a full fence */
    _Atomic bool keeps_short;   /* metered queues have launches just in time (Q5 of meter.h) */
    _Atomic uint32_t contexts;  /* CONTEXTS_ */
    const uint64_t *barred;     /* in the page of hints: openings up to this grant are barred (G5) */
    const uint64_t *co_runs;    /* in the page of hints: odd while other tenants hold the GPUs at the same time */
    _Atomic uint64_t grant;     /* under which it was opened; GATE_NO_GRANT: by the duty cycle */
    _Atomic uint32_t closing __attribute__((aligned(64))); /* openings so far: which closing this or the next one is */
    _Atomic uint32_t wanted;                               /* the last closing whose end a thread has waited for */
    _Atomic uint32_t next_closing;                         /* while it is open: the closing to come */
    _Atomic uint64_t deadline;   /* when the gate is going to close, of sys_now; SYS_NEVER: not known */
    _Atomic uint64_t drained;    /* when all work of the last opening had ended */
    _Atomic uint64_t undrained;  /* the last check before that; 0: none */
    _Atomic uint32_t slot_count; /* slots ever used */
    _Atomic uint32_t next_claim; /* where the next search for a slot of an exited thread starts */
    /* Threads beyond GATE_SLOTS share this one: the ids of threads inside a launch, 0 in a free place; the number of
     * threads inside that found no place; launches passed. */
    _Atomic int shared_threads[SHARED_PLACES];
    _Atomic uint64_t shared_inside, shared_passed;
    struct slot slots[GATE_SLOTS];
};

/* From any thread. */

/* Return whether the agent has barred the opening of that word (G5). For an open gate. */
static inline bool gate_barred(const struct gate *gate, uint32_t word) {
    return (word & GATE_METERED) != 0 &&
           atomic_load_explicit((const _Atomic uint64_t *)gate->barred, memory_order_relaxed) >=
               atomic_load_explicit(&gate->grant, memory_order_relaxed);
}
/* Return how often other tenants have begun or ceased to hold the GPUs at the same time; odd: some do. */
static inline uint64_t gate_co_runs(const struct gate *gate) {
    return atomic_load_explicit((const _Atomic uint64_t *)gate->co_runs, memory_order_relaxed);
}
/* Return whether the agent has barred the last opening. For the hook thread. */
static inline bool gate_taken(const struct gate *gate) {
    return atomic_load_explicit((const _Atomic uint64_t *)gate->barred, memory_order_relaxed) >=
           atomic_load_explicit(&gate->grant, memory_order_relaxed);
}

/* Set how many stream captures are open. With the lock of struct streams. */
void gate_set_captures(struct gate *gate, uint32_t captures);

/* For the hook thread alone. */

/* Prepare the gate, before the thread runs. `slots`: slots to leave unused, see passage.c. `barred`, `co_runs`: in the
 * page of hints. The gate is set up once its word is not 0. */
void gate_prepare(struct gate *gate, uint32_t slots, const uint64_t *barred, const uint64_t *co_runs);
/* Open the gate: launches pass until gate_close. `deadline`: when that is expected; SYS_NEVER: not known. `grant`: its
 * id, or GATE_NO_GRANT. */
void gate_open(struct gate *gate, bool metered, uint64_t deadline, uint64_t grant);
/* Set new terms while the gate is open. */
void gate_prolong(struct gate *gate, bool metered, uint64_t deadline, uint64_t grant);
/* From now on each launch is waited for by its own thread (P4): the hook thread makes no more driver calls. */
void gate_exit(struct gate *gate);
/* Close the gate. Launches may be under way until gate_clear returns true (G1, G3). */
void gate_close(struct gate *gate);
/* Return whether no thread is inside a launch. After gate_close a true answer stays true (G1). */
bool gate_clear(struct gate *gate);
/* Return whether a thread waits for the gate that is closed now. A thread that waits no more, because it was cancelled
 * or because its signal handler has jumped away, counts until the next opening at most. */
bool gate_wanted(const struct gate *gate);
/* Return whether a thread that waited for this opening, or for a fence in it, has not run yet; `forget` threads that
 * should have by now. */
bool gate_waking(struct gate *gate, bool forget);
/* Note that a thread waits for the end of that closing (G4). A late note does not undo that of a later closing. */
void gate_want(struct gate *gate, uint32_t closing);
/* Return how many launches have entered so far. */
uint64_t gate_launches(const struct gate *gate);
/* Return how many launches have left so far. At a closed gate a thread that has entered finds that and steps back: only
 * this count is right there. */
uint64_t gate_finished(const struct gate *gate);

#endif
