/* The wrapped cuInit: the first CUDA call of most programs, and so where the hook starts in them. */
#include "driver/entries.h"
#include "process/process.h"

EXPORT CUresult cuInit(unsigned int flags) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS)
        return result;
    return HAS(cuInit) ? DRIVER(cuInit)(flags) : CUDA_ERROR_NOT_FOUND;
}
