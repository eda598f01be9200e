/* What the wrappers of memory calls share: the current context's GPU, and the tenant's view of its memory. */
#ifndef SHAREPOD_LINEAR_H
#define SHAREPOD_LINEAR_H

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

enum { MEMORY_GRANULARITY = 512 }; /* bytes: the driver rounds every allocation up to a multiple of this */

/* The current context and the place of its GPU (-1: none of the tenant's); what the driver says if there is none. */
CUresult memory_here(CUcontext *context, int *place);
/* The tenant's limit on a GPU and what all its processes use of it, asked of the agent (1 s at most); false where it
 * is not enforced, or none of the tenant's. */
bool memory_view(int place, uint64_t *limit, uint64_t *used);

#endif
