/* The wrapped cuInit: the first CUDA call of most programs. There the hook starts, once the driver has reported a
 * device (H4). */
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
