/* How a wrapper lets the driver's function through the gate where nanoseconds do not matter: not inlined. */
#ifndef SHAREPOD_PASSING_H
#define SHAREPOD_PASSING_H

#include "driver/entries.h"
#include "time/gate.h"
#include "process/process.h"

/* Through the gate if `runs`, else straight on: the call makes the device do nothing that is to be shared. */
#define PASSING(runs, symbol, stream, per_thread, ...)                                      \
    struct passage passage = {.refused = process_enter()};                                  \
    if (passage.refused == CUDA_SUCCESS && (runs))                                          \
        passage = gate_pass(stream, per_thread);                                            \
    if (passage.refused != CUDA_SUCCESS)                                                    \
        return passage.refused;                                                             \
    CUresult result = HAS(symbol) ? DRIVER(symbol)(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND;     \
    gate_leave(&passage);                                                                   \
    return result

#endif
