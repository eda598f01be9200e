/* End of contexts, for the wrappers that destroy them. */
#ifndef SHAREPOD_CONTEXTS_H
#define SHAREPOD_CONTEXTS_H

#include <cuda.h>

/* Give back the charges of all that was allocated in a context that is gone, and of the context itself. */
void memory_forget_context(CUcontext context);

#endif
