/* Entering the gate where the fast path does not apply: sets up the process first. At the gate the thread may wait. */
#include "wrappers/work/passthrough.h"

__attribute__((noinline)) struct passage enter_slowly(CUstream stream, bool per_thread) {
    CUresult refused = process_enter();
    if (refused != CUDA_SUCCESS)
        return (struct passage){.refused = refused};
    struct process *process = the_process;
    return passage_enter(&process->gate, &process->streams, stream, per_thread);
}

struct passage enter(CUstream stream, bool per_thread) {
    struct slot *slot = passage_slot;
    struct queue *queue = enter_fast(slot, stream, per_thread);
    if (LIKELY(queue != NULL))
        return (struct passage){
            .gate = &the_process->gate, .streams = &the_process->streams, .slot = slot, .queue = queue};
    return enter_slowly(stream, per_thread);
}

struct passage pass_by(CUstream stream, bool per_thread) {
    meter_before_ungated(&the_process->gate, &the_process->streams, passage_slot, stream, per_thread);
    return (struct passage){.refused = CUDA_SUCCESS};
}
