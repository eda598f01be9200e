/* The end of a context, and what was held in it. */
#ifndef SHAREPOD_CONTEXTS_H
#define SHAREPOD_CONTEXTS_H

#include <cuda.h>

/* The context is gone, and what was held in it. */
void memory_forget_context(CUcontext context);

#endif
