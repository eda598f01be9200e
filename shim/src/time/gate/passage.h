/* The passage: a launch on its way through the gate. This is the side of the program's threads; gate.h has the hook
 * thread's.
 *
 * Guarantees:
 * - P1 an admitted launch is visible to gate_clear until passage_leave (G1).
 * - P2 registered-before-launch: its stream is in the registry before it is admitted, so that a drain waits for its
 *   work.
 * - P3 a launch inside another launch of the same thread is covered by the outer passage.
 * - P4 after gate_exit a passage ends when the launched work has ended, so that the hook thread has nothing left to
 *   drain.
 */
#ifndef SHAREPOD_PASSAGE_H
#define SHAREPOD_PASSAGE_H

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

#include "time/gate/gate.h"
#include "time/streams.h"

/* This thread's slot, or NULL. */
extern __thread struct slot *passage_slot __attribute__((tls_model("initial-exec")));

/* A launch between passage_enter and passage_leave. */
struct passage {
    CUresult refused;    /* not CUDA_SUCCESS: the launch's result, nothing was entered */
    struct gate *gate;   /* that was entered; NULL: the launch is not gated */
    struct slot *slot;   /* NULL: through the shared one, or not gated */
    int place;           /* in the shared one; SHARED_PLACES: none */
    struct queue *queue; /* NULL: launches are not counted */
    CUstream named;      /* by its one name, see stream_named */
    bool waited;         /* the gate was closed when it came */
};

/* Enter for a launch into that stream. `per_thread`: the handle is as the _ptsz functions read it. Waits while the gate
 * is closed. For what the fast path does not cover, see fastpath.h. */
struct passage passage_enter(struct gate *gate, struct streams *streams, CUstream stream, bool per_thread);
/* Leave after the launch. Under a metered grant this may wait for earlier work. */
void passage_leave(struct passage *passage);
/* Leave without having launched. */
void passage_abandon(struct passage *passage);
/* Note, inside a passage, that the launch puts work on this stream too. False: no memory to remember it. */
bool passage_note(struct gate *gate, struct streams *streams, CUstream stream, bool per_thread);
/* Wait, while the gate is open, for the opening after the closing to come, or until this opening is prolonged beyond
 * `deadline`. */
void passage_wait_next(struct gate *gate, uint32_t closing, uint64_t deadline);

/* Return how many slots a gate that is set up again must leave alone. */
uint32_t passage_slots_seen(void);
/* Forget the slots, in a child of fork. */
void passage_after_fork(void);

#endif
