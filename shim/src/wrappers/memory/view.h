/* The tenant's view of a GPU's memory: its limit, and the use of its processes. */
#ifndef SHAREPOD_VIEW_H
#define SHAREPOD_VIEW_H

#include <stdbool.h>
#include <stdint.h>

/* Get the tenant's limit on a GPU and the memory use of all its processes, in bytes, from the agent (for at most 1 s).
 * Return false if the limit is not enforced, or the GPU is not the tenant's. */
bool memory_view(int place, uint64_t *limit, uint64_t *used);

#endif
