/* Passage of wrapped calls through the process's gate. enter_fast and leave_fast are inlined into launches of kernels
 * and graphs (G2); PASSTHROUGH is for calls where nanoseconds do not matter.
 */
#ifndef SHAREPOD_PASSTHROUGH_H
#define SHAREPOD_PASSTHROUGH_H

#include "driver/entries.h"
#include "process/process.h"
#include "time/gate/fastpath.h"
#include "time/queue/meter.h"
#include "time/gate/passage.h"

/* Enter by the fast path. Not NULL: inside a launch, and leave_fast is to follow. `slot`: passage_slot; a thread that
 * has a slot has a process. */
FAST struct queue *enter_fast(struct slot *slot, CUstream stream, bool per_thread) {
    return LIKELY(slot != NULL) ? gate_enter_fast(&the_process->gate, slot, stream, per_thread) : NULL;
}

/* Leave after the launch; under a metered grant this may wait. */
FAST void leave_fast(struct slot *slot, struct queue *queue) {
    if (gate_leave_fast(slot, queue))
        meter_launched(&the_process->gate, slot, queue);
}

/* Enter where the fast path did not: set the process up if need be, wait while the gate is closed. */
struct passage enter_slowly(CUstream stream, bool per_thread);
/* Enter by the fast path, else slowly. */
struct passage enter(CUstream stream, bool per_thread);

/* Go past the gate with a call that makes the device do nothing that is shared. A drain will not wait for it (D3). */
struct passage pass_by(CUstream stream, bool per_thread);

/* Body of a wrapper: through the gate if `runs`, else past it. */
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
