/* Charges of contexts that have ended, for the wrappers that destroy contexts. */
#ifndef SHAREPOD_CONTEXTS_H
#define SHAREPOD_CONTEXTS_H

#include <cuda.h>

/* Return the charges of all allocations in a context that has ended, and of the context itself. */
void memory_forget_context(CUcontext context);

#endif
