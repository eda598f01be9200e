/* The gate: one word that decides whether launches may pass, and a slot per thread that shows whether the thread is
 * inside a launch. An opening is a period in which the gate is open, a closing a period in which it is closed. This
 * header has the functions of the hook thread; passage.h and fastpath.h have the functions of the program's threads.
 *
 * Guarantees:
 * - G1 no-entry-after-clear: once gate_clear has returned true after gate_close, no thread is inside a launch, and no
 *   thread enters until gate_open. Exception: launches that a stream capture records, which run nothing.
 * - G2 launch-costs-no-shared-write: with the gate open, a launch takes no lock, reads no clock, makes no system call
 *   and writes no shared cache line. It costs two stores to the thread's own slot, one store to the thread's own queue,
 *   and a load of the gate word. The last launch of a window also records a fence (meter.h).
 * - G3 slot-before-word: a thread's store to its slot is visible before the thread loads the gate word. G1 depends on
 *   this order. The closing thread ensures it by membarrier. Where seccomp forbids membarrier, each launch ensures it
 *   by a full fence.
 * - G4 no-lost-wake-up: the next opening wakes every thread that has announced its wait by gate_want.
 * - G5 barred: the agent can bar a metered opening, also while the hook thread gets no processor time and so cannot
 *   close the gate. Later launches wait for the next opening. A thread that is inside a launch finishes that launch.
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

/* GATE_SLOTS: threads that get a slot of their own, more than most containers allow. Further threads use one shared
 * slot, so their launches write a shared cache line (no G2). A slot takes memory when it is first used. SLOT_RECENT:
 * number of a thread's queues whose expected ends are stored separately. Of its other queues only the latest end is
 * stored.
 */
enum { GATE_SLOTS = SHAREPOD_GATE_SLOTS, SLOT_RECENT = 16 };

/* Bits of the gate word. The word 0 means that the gate is not set up; memory that a fork has zeroed has the same
 * value. The bits from GATE_STEP on are a counter. Every opening, every change of its terms and gate_exit add
 * GATE_STEP, so that threads register their streams again. */
enum { GATE_READY = 1, GATE_OPEN = 2, GATE_METERED = 4, GATE_CAPTURING = 8, GATE_STEP = 16 };

/* Number of contexts. With only one, the handle of a default stream always names the same stream. With UNKNOWN (also
 * the value of zeroed memory) and SEVERAL, the hook queries the driver for the current context. ONE: the machine has
 * one device, and only its primary context was ever requested. Graphics calls may create another context, and the hook
 * does not wrap them: it finds such a context at the next opening of the gate. */
enum { CONTEXTS_UNKNOWN, CONTEXTS_ONE, CONTEXTS_SEVERAL };

/* A thread's slot, in cache lines of its own (G2). */
struct slot {
    struct remembered remembered; /* the thread's queues, by stream; the end of this member shares a cache line with the
                                     next members */
    _Atomic uint64_t sequence;    /* incremented when a launch enters and when it leaves. Odd: the thread is inside a
                                     launch */
    _Atomic int thread;           /* thread id; 0: the slot was never used, or a fork has zeroed it */
    _Atomic uint32_t waits; /* number of the closing whose end the thread waits for (struct gate: `closing`); 0: none
                             */
    _Atomic bool waits_for_fence; /* the thread waits for a fence, and will launch once the fence has passed */
    _Atomic bool waits_due;       /* the thread waits until its launch is due (queue that is kept short): at most for
                                     one kernel */
    _Atomic uint32_t unknown;     /* opening (by the number of its closing) in which the thread made launches of unknown
                                     duration; 0: none */
    _Atomic uint64_t ends_at;     /* ns: expected end of this thread's metered work */
    struct queue *queues, *ended; /* queues of this thread, and its queues whose streams have ended; guarded by the lock
                                     of struct streams */
    struct queue *recent[SLOT_RECENT]; /* the thread's recently used queues, by hash; of two with the same hash, the
                                          later one is stored */
    uint64_t forgotten_end;            /* ns: latest expected end of the queues that are not in `recent` */
    uint32_t foretold;                 /* the opening for which forgotten_end is valid, by the number of its closing */
} __attribute__((aligned(128)));

/* Number of threads without a slot of their own whose ids are stored while they are inside a launch. By its id the hook
 * sees that a thread has exited inside a launch, so that it does not delay a closing. */
enum { SHARED_PLACES = 64 };

#define GATE_NO_GRANT UINT64_MAX /* value of `grant` without a grant: the agent cannot bar the opening */

struct gate {
    _Atomic uint32_t word;
    _Atomic uint32_t captures;  /* number of open stream captures; GATE_CAPTURING is set while it is not 0 */
    _Atomic bool exits;         /* the program ends: each thread waits for its own launches */
    _Atomic bool no_membarrier; /* membarrier(2) is forbidden: each launch executes a full memory fence */
    _Atomic bool keeps_short;   /* each launch into a metered queue passes only shortly before the earlier work ends (Q5
                                   of meter.h) */
    _Atomic uint32_t contexts;  /* CONTEXTS_UNKNOWN, CONTEXTS_ONE or CONTEXTS_SEVERAL */
    const uint64_t *barred;     /* address in the hints page: metered openings with this grant id or a lower one are
                                   barred (G5) */
    const uint64_t *co_runs;    /* address in the hints page: odd while other tenants co-run */
    _Atomic uint64_t grant;     /* id of the grant of this opening; GATE_NO_GRANT: opened without an agent, by the file
                                   `limits` */
    _Atomic uint32_t closing __attribute__((aligned(64))); /* number of openings so far, plus 1. It names the present
                                                              closing, or while the gate is open the next one */
    _Atomic uint32_t wanted;       /* number of the last closing whose end a thread has waited for */
    _Atomic uint32_t next_closing; /* while the gate is open: number of the next closing */
    _Atomic uint64_t deadline;     /* sys_now() at which the gate is going to close; SYS_NEVER: not known */
    _Atomic uint64_t drained;      /* time at which all work of the last opening had ended */
    _Atomic uint64_t undrained;    /* time of the last check that found work of the last opening unfinished; 0: no such
                                      check */
    _Atomic uint32_t slot_count;   /* number of slots used so far */
    _Atomic uint32_t next_claim;   /* where the next search for the slot of an exited thread starts */
    /* Slot that all threads beyond GATE_SLOTS share. shared_threads: ids of its threads inside a launch; 0: free place.
     * shared_inside: number of its threads inside a launch that have no place. shared_passed: launches passed. */
    _Atomic int shared_threads[SHARED_PLACES];
    _Atomic uint64_t shared_inside, shared_passed;
    struct slot slots[GATE_SLOTS];
};

/* Any thread may call the following functions. */

/* Return true if the agent has barred the present opening (G5). `word`: the gate word of an open gate. */
static inline bool gate_barred(const struct gate *gate, uint32_t word) {
    return (word & GATE_METERED) != 0 &&
           atomic_load_explicit((const _Atomic uint64_t *)gate->barred, memory_order_relaxed) >=
               atomic_load_explicit(&gate->grant, memory_order_relaxed);
}
/* Return the number of times that other tenants have begun or ceased to co-run, by the hints page; odd: others co-run
 * now. */
static inline uint64_t gate_co_runs(const struct gate *gate) {
    return atomic_load_explicit((const _Atomic uint64_t *)gate->co_runs, memory_order_relaxed);
}
/* Return true if the agent has barred the last opening, metered or not. Only the hook thread calls this. */
static inline bool gate_taken(const struct gate *gate) {
    return atomic_load_explicit((const _Atomic uint64_t *)gate->barred, memory_order_relaxed) >=
           atomic_load_explicit(&gate->grant, memory_order_relaxed);
}

/* Set the number of open stream captures. The caller holds the lock of struct streams. */
void gate_set_captures(struct gate *gate, uint32_t captures);

/* Only the hook thread may call the following functions. */

/* Prepare the gate before the hook thread runs. `slots`: number of slots to leave unused, see passage_slots_seen.
 * `barred`, `co_runs`: addresses in the hints page. The gate word stays 0; process.c sets it last. */
void gate_prepare(struct gate *gate, uint32_t slots, const uint64_t *barred, const uint64_t *co_runs);
/* Open the gate: launches pass until gate_close. `deadline`: expected time of gate_close; SYS_NEVER: not known.
 * `grant`: id of the grant, or GATE_NO_GRANT. */
void gate_open(struct gate *gate, bool metered, uint64_t deadline, uint64_t grant);
/* Set new terms while the gate is open. Parameters as in gate_open. */
void gate_prolong(struct gate *gate, bool metered, uint64_t deadline, uint64_t grant);
/* From now on each thread waits for its own launches (P4, passage.h), because the hook thread makes no more driver
 * calls. */
void gate_exit(struct gate *gate);
/* Close the gate. Threads may be inside launches until gate_clear returns true (G1, G3). */
void gate_close(struct gate *gate);
/* Return whether no thread is inside a launch. After gate_close, a result of true stays true until gate_open (G1). */
bool gate_clear(struct gate *gate);
/* Return true if a thread waits at the closed gate. A thread whose wait was cut short, by cancellation or a jump out of
 * a signal handler, still counts until the next opening. */
bool gate_wanted(const struct gate *gate);
/* Return true if a thread waits for this opening, for a fence, or until its launch is due: it will launch soon, so the
 * token should not be returned yet. `forget`: ignore threads that wait for the opening or for a fence, because they
 * should have run by now. */
bool gate_waking(struct gate *gate, bool forget);
/* Record that a thread waits for the end of the closing with this number (G4). Has no effect if a later closing is
 * recorded. */
void gate_want(struct gate *gate, uint32_t closing);
/* Return the number of launches that have entered so far. */
uint64_t gate_launches(const struct gate *gate);
/* Return the number of launches that have left so far. At a closed gate only this number is exact: gate_launches also
 * counts a thread that has entered, until the thread sees that the gate is closed. */
uint64_t gate_finished(const struct gate *gate);

#endif
