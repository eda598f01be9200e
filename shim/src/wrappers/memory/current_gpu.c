/* The GPU of the current context. */
#include "wrappers/memory/current_gpu.h"

#include "driver/entries.h"
#include "memory/state.h"
#include "process/process.h"

CUresult current_gpu(CUcontext *context, int *place) {
    CUdevice device;
    CUresult result = process_enter();
    if (result == CUDA_SUCCESS && context != NULL && atomic_load(&the_process->gate.contexts) == CONTEXTS_ONE &&
        DRIVER(cuCtxGetCurrent)(context) == CUDA_SUCCESS && *context != NULL) {
        *place = gpus_place(memory_state()->gpus, 0);
        return CUDA_SUCCESS;
    }
    if (result == CUDA_SUCCESS)
        result = HAS(cuCtxGetDevice) ? DRIVER(cuCtxGetDevice)(&device) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS && context != NULL)
        result = DRIVER(cuCtxGetCurrent)(context);
    if (result == CUDA_SUCCESS)
        *place = gpus_place(memory_state()->gpus, device);
    return result;
}
