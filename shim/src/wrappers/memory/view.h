/* The tenant's view of a GPU's memory: its limit, and its processes' usage. */
#ifndef SHAREPOD_VIEW_H
#define SHAREPOD_VIEW_H

#include <stdbool.h>
#include <stdint.h>

/* Get the tenant's limit on a GPU and the usage of all its processes, in bytes, from the agent (1 s at most). False
 * where the limit is not enforced, or the GPU is not the tenant's. */
bool memory_view(int place, uint64_t *limit, uint64_t *used);

#endif
