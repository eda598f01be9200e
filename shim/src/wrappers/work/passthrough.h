/* Passage of wrapped calls through the process's gate. enter_fast and leave_fast are inlined into launches of kernels
 * and graphs (G2, gate.h). PASSTHROUGH is the body of other wrappers, which are not inlined. */
#ifndef SHAREPOD_PASSTHROUGH_H
#define SHAREPOD_PASSTHROUGH_H

#include "driver/entries.h"
#include "process/process.h"
#include "time/gate/fastpath.h"
#include "time/queue/meter.h"
#include "time/gate/passage.h"

/* Enter the gate by the fast path. Return the thread's queue on the stream: the thread is inside a launch, and
 * leave_fast must follow. Return NULL if the fast path does not apply. `slot`: passage_slot. If a thread has a slot,
 * the process is set up. */
FAST struct queue *enter_fast(struct slot *slot, CUstream stream, bool per_thread) {
    return LIKELY(slot != NULL) ? gate_enter_fast(&the_process->gate, slot, stream, per_thread) : NULL;
}

/* Leave the gate after the launch. Under a metered grant this may wait for earlier work. */
FAST void leave_fast(struct slot *slot, struct queue *queue) {
    if (gate_leave_fast(slot, queue))
        meter_launched(&the_process->gate, &the_process->streams, slot, queue);
}

/* Enter the gate after enter_fast has returned NULL. Set up the process if necessary, and wait while the gate is
 * closed. */
struct passage enter_slowly(CUstream stream, bool per_thread);
/* Enter the gate by the fast path if it applies, else by enter_slowly. */
struct passage enter(CUstream stream, bool per_thread);

/* Prepare a call that bypasses the gate, because it does not occupy the GPU's multiprocessors: record fences first, so
 * that no drain waits for the call (D3, drain.h). */
struct passage pass_by(CUstream stream, bool per_thread);

/* Body of a wrapper. `runs`: the call passes the gate; else it bypasses the gate. */
#define PASSTHROUGH(runs, symbol, stream, per_thread, ...)                              \
    struct passage passage = {.refused = process_enter()};                              \
    if (passage.refused == CUDA_SUCCESS)                                                \
        passage = (runs) ? enter(stream, per_thread) : pass_by(stream, per_thread);     \
    if (passage.refused != CUDA_SUCCESS)                                                \
        return passage.refused;                                                         \
    CUresult result = HAS(symbol) ? DRIVER(symbol)(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND; \
    passage_leave(&passage);                                                            \
    return result

#endif
