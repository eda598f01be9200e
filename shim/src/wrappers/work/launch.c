/* Wrapped launches of kernels. Each enters the gate, calls the driver, and leaves the gate. G2 (gate.h) states the cost
 * while the gate is open. */
#include "driver/entries.h"
#include "wrappers/work/passthrough.h"

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) /* ThreadSanitizer does not see the assembler's stores */
#include "wrappers/work/launch_entry.h"
#endif

/* Body of a wrapper that launches. */
#define THROUGH_GATE(symbol, stream, per_thread, ...)                                                  \
    struct slot *slot = passage_slot;                                                                  \
    struct queue *queue = enter_fast(slot, stream, per_thread);                                        \
    if (LIKELY(queue != NULL)) {                                                                       \
        __typeof__(&symbol) driver = DRIVER(symbol);                                                   \
        CUresult result = LIKELY(driver != NULL) ? driver(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND;         \
        leave_fast(slot, LIKELY(result == CUDA_SUCCESS) ? queue : NULL);                               \
        return result;                                                                                 \
    }                                                                                                  \
    struct passage passage = enter_slowly(stream, per_thread);                                         \
    if (passage.refused != CUDA_SUCCESS)                                                               \
        return passage.refused;                                                                        \
    CUresult result = HAS(symbol) ? DRIVER(symbol)(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND;                \
    if (UNLIKELY(result != CUDA_SUCCESS))                                                              \
        passage.queue = NULL; /* the launch failed: it is not counted, and the stream may not exist */ \
    passage_leave(&passage);                                                                           \
    return result

#define KERNEL_PARAMETERS                                                                                         \
    (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, \
     CUstream stream, void **parameters, void **extra)

/* Define `function` as the wrapper of cuLaunchKernel or cuLaunchKernel_ptsz (`per_thread`). */
#define LAUNCH_KERNEL(linkage, function, symbol, per_thread)                                                    \
    linkage CUresult function KERNEL_PARAMETERS {                                                               \
        THROUGH_GATE(symbol, stream, per_thread, f, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra); \
    }

#define LAUNCH_KERNEL_EX(symbol, per_thread)                                                              \
    EXPORT CUresult symbol(const CUlaunchConfig *config, CUfunction f, void **parameters, void **extra) { \
        THROUGH_GATE(symbol, config ? config->hStream : NULL, per_thread, config, f, parameters, extra);  \
    }

#define LAUNCH_COOPERATIVE(symbol, per_thread)                                                                         \
    EXPORT CUresult symbol(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, \
                           unsigned shared, CUstream stream, void **parameters) {                                      \
        THROUGH_GATE(symbol, stream, per_thread, f, gx, gy, gz, bx, by, bz, shared, stream, parameters);               \
    }

#ifdef LAUNCH_ENTRY
#define BEHIND_ENTRY static __attribute__((used, noinline))
#pragma GCC diagnostic ignored "-Wunused-parameter" /* only assembler code uses them */

/* Record the fence that is due after a launch. LAUNCH_ENTRY jumps here, so this function returns to the program. */
BEHIND_ENTRY CUresult launched(struct slot *slot, struct queue *queue) {
    meter_launched(&the_process->gate, &the_process->streams, slot, queue);
    return CUDA_SUCCESS;
}

LAUNCH_KERNEL(BEHIND_ENTRY, any_cuLaunchKernel, cuLaunchKernel, false)
LAUNCH_KERNEL(BEHIND_ENTRY, any_cuLaunchKernel_ptsz, cuLaunchKernel_ptsz, true)
LAUNCH_ENTRY(cuLaunchKernel, 1, KERNEL_PARAMETERS)
LAUNCH_ENTRY(cuLaunchKernel_ptsz, 2, KERNEL_PARAMETERS)
#else
LAUNCH_KERNEL(EXPORT, cuLaunchKernel, cuLaunchKernel, false)
LAUNCH_KERNEL(EXPORT, cuLaunchKernel_ptsz, cuLaunchKernel_ptsz, true)
#endif
LAUNCH_KERNEL_EX(cuLaunchKernelEx, false)
LAUNCH_KERNEL_EX(cuLaunchKernelEx_ptsz, true)
LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel, false)
LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel_ptsz, true)

/* One passage covers the launches on all devices, because the tenant's GPUs are granted together. */
EXPORT CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *launches, unsigned int count,
                                                     unsigned int flags) {
    struct passage first = enter_slowly(launches && count > 0 ? launches[0].hStream : NULL, false);
    if (first.refused != CUDA_SUCCESS)
        return first.refused;
    /* The driver refuses a list with an empty entry. So entries after an empty one are not read, because the list may
     * end there. */
    for (unsigned i = 1; launches != NULL && first.gate != NULL && i < count && launches[i - 1].function != NULL; i++)
        if (!passage_note(first.gate, &the_process->streams, launches[i].hStream, false)) {
            passage_abandon(&first);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    CUresult result = HAS(cuLaunchCooperativeKernelMultiDevice)
                          ? DRIVER(cuLaunchCooperativeKernelMultiDevice)(launches, count, flags)
                          : CUDA_ERROR_NOT_FOUND;
    passage_leave(&first);
    return result;
}

/* Launches of CUDA 3. */
EXPORT CUresult cuLaunch(CUfunction f) {
    THROUGH_GATE(cuLaunch, NULL, false, f);
}

EXPORT CUresult cuLaunchGrid(CUfunction f, int width, int height) {
    THROUGH_GATE(cuLaunchGrid, NULL, false, f, width, height);
}

EXPORT CUresult cuLaunchGridAsync(CUfunction f, int width, int height, CUstream stream) {
    THROUGH_GATE(cuLaunchGridAsync, stream, false, f, width, height, stream);
}
