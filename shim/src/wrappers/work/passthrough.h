/* How a wrapped call passes the gate. THROUGH_GATE has the fast path inlined, for launches of kernels and graphs;
 * PASSTHROUGH is for calls where nanoseconds do not matter.
 */
#ifndef SHAREPOD_PASSTHROUGH_H
#define SHAREPOD_PASSTHROUGH_H

#include "driver/entries.h"
#include "process/process.h"
#include "time/fastpath.h"
#include "time/meter.h"
#include "time/passage.h"

/* Enters by the fast path. Not NULL: inside a launch, and leave_fast is to follow. A thread that has a slot has a
 * process. */
FAST struct slot_stream *enter_fast(struct slot *slot, CUstream stream, bool per_thread) {
    return LIKELY(slot != NULL) ? gate_enter_fast(&the_process->gate, slot, stream, per_thread) : NULL;
}

FAST void leave_fast(struct slot *slot, struct slot_stream *entry) {
    if (gate_leave_fast(slot, entry))
        meter_launched(&the_process->gate, slot, entry);
}

/* Enters where the fast path did not: sets the process up if need be, waits while the gate is closed. */
struct passage enter_slowly(CUstream stream, bool per_thread);
/* Enters by the fast path or slowly. */
struct passage enter(CUstream stream, bool per_thread);

/* Through the gate if `runs`, else straight on: the call makes the device do nothing that is to be shared. */
#define PASSTHROUGH(runs, symbol, stream, per_thread, ...)                              \
    struct passage passage = {.refused = process_enter()};                              \
    if (passage.refused == CUDA_SUCCESS && (runs))                                      \
        passage = enter(stream, per_thread);                                            \
    if (passage.refused != CUDA_SUCCESS)                                                \
        return passage.refused;                                                         \
    CUresult result = HAS(symbol) ? DRIVER(symbol)(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND; \
    passage_leave(&passage);                                                            \
    return result

#endif
