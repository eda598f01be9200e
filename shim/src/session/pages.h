/* Pages that the process shares with the agent: the hints page, which the hook reads, and the pulse page, which it
 * writes. Their descriptors arrive with WELCOME. A child of fork inherits neither page.
 *
 * The hints page has the same address for the life of the process, because threads at the gate read it without a lock.
 */
#ifndef SHAREPOD_PAGES_H
#define SHAREPOD_PAGES_H

#include <stdbool.h>

#include "sharepod/protocol.h"

/* Return an address for the hints page, with empty hints there; NULL: no memory. */
const struct shp_hints *hints_reserve(void);
/* Map the hints page behind a descriptor at `place`. If the file is no hints page or cannot be mapped, map empty hints.
 * The caller closes the descriptor. */
void hints_map(const struct shp_hints *place, int descriptor);
/* Map empty hints at `place`. */
void hints_clear(const struct shp_hints *place);

/* Map the pulse page behind a descriptor and return its address; NULL: the file is too short or cannot be mapped. The
 * caller closes the descriptor. */
struct shp_pulse *pulse_map(int descriptor);
/* Unmap the pulse page. `pulse` may be NULL. */
void pulse_unmap(struct shp_pulse *pulse);

#endif
