/* Wrapped cuInit, which is the first CUDA call of most programs. It starts the hook after the driver has reported a
 * device (H4, process.h). */
#include "driver/entries.h"
#include "process/process.h"

EXPORT CUresult cuInit(unsigned int flags) {
    if (!entries_load() || !HAS(cuInit))
        return CUDA_ERROR_NOT_FOUND;
    CUresult result = DRIVER(cuInit)(flags);
    if (result != CUDA_SUCCESS)
        return result;
    process_watch_exit();
    return process_enter();
}
