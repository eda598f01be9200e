/* The hints page that comes with WELCOME: read-only memory shared with the agent. */
#ifndef SHAREPOD_HINTS_H
#define SHAREPOD_HINTS_H

#include "sharepod/protocol.h"

/* Map the page of that descriptor, which stays the caller's. NULL: it is no hints page, or cannot be mapped. A child of
 * fork does not inherit the mapping. */
const struct shp_hints *hints_map(int descriptor);
/* Unmap the page; NULL is allowed. */
void hints_unmap(const struct shp_hints *hints);

#endif
