/* The GPU of the current context, to which wrappers charge memory. */
#ifndef SHAREPOD_CURRENT_GPU_H
#define SHAREPOD_CURRENT_GPU_H

#include <cuda.h>

/* Get the current context (`context` may be NULL) and the place of its GPU in struct gpus (-1: not a GPU of the
 * tenant). Return the driver's answer, or the error of process_enter. */
CUresult current_gpu(CUcontext *context, int *place);

#endif
