/* The passage: a thread's path through the gate, from entering to leaving a launch. This header has the functions of
 * the program's threads; gate.h has the functions of the hook thread.
 *
 * Guarantees:
 * - P1 After a launch is admitted, gate_clear sees the thread inside it until passage_leave (G1, gate.h).
 * - P2 registered-before-launch: the stream is registered before the launch is admitted, so that a drain waits for the
 *   launch's work.
 * - P3 A launch inside a launch of the same thread, as when one driver call makes another, needs no passage of its own.
 * - P4 After gate_exit, a thread leaves a passage when the launched work has ended, so the hook thread has nothing left
 *   to drain. Exceptions: the stream waits for the program, or its work takes more than 1 s.
 */
#ifndef SHAREPOD_PASSAGE_H
#define SHAREPOD_PASSAGE_H

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

#include "time/gate/gate.h"
#include "time/streams.h"

/* The calling thread's slot; NULL: it has none. */
extern __thread struct slot *passage_slot __attribute__((tls_model("initial-exec")));

/* A launch between passage_enter and passage_leave. */
struct passage {
    CUresult refused;        /* CUDA_SUCCESS, or the error that the launch must return: the gate was then not entered */
    struct gate *gate;       /* gate that was entered; NULL: the launch is not gated */
    struct streams *streams; /* registry of the gate's streams */
    struct slot *slot;       /* the thread's slot; NULL: the launch uses the shared slot, or is not gated */
    int place;               /* index in shared_threads; SHARED_PLACES: none */
    struct queue *queue;     /* NULL: launches are not counted */
    CUstream named;          /* name of the stream, see stream_named */
    bool waited;             /* the gate was closed when the thread arrived */
};

/* Enter the gate for a launch into this stream. `per_thread`: the handle has its meaning in the _ptsz functions. Waits
 * while the gate is closed. Used where the fast path does not apply (fastpath.h). */
struct passage passage_enter(struct gate *gate, struct streams *streams, CUstream stream, bool per_thread);
/* Leave the gate after the launch. Under a metered grant this may wait for earlier work. */
void passage_leave(struct passage *passage);
/* Leave the gate without a launch. */
void passage_abandon(struct passage *passage);
/* Register another stream, inside a passage, because the launch also puts work into that stream. Return false if there
 * is no memory for that. */
bool passage_note(struct gate *gate, struct streams *streams, CUstream stream, bool per_thread);
/* Wait until the closing with this number is over, so that the next opening has begun, or until the present opening is
 * prolonged beyond `deadline`. */
void passage_wait_next(struct gate *gate, uint32_t closing, uint64_t deadline);

/* Return the number of slots used so far. A gate that is set up again, in a child of fork, must leave as many unused.
 */
uint32_t passage_slots_seen(void);
/* Reset this thread's slot and the number of used slots, in a child of fork. */
void passage_after_fork(void);

#endif
