/* The pages shared with the agent, whose descriptors come with WELCOME: the hints page, which is read, and the pulse
 * page, which is written. A child of fork inherits neither.
 *
 * The hints page keeps its address for as long as the process lives: threads at the gate read it without a lock.
 */
#ifndef SHAREPOD_PAGES_H
#define SHAREPOD_PAGES_H

#include <stdbool.h>

#include "sharepod/protocol.h"

/* Return a place for the hints page, with empty hints in it. NULL: no memory. */
const struct shp_hints *hints_reserve(void);
/* Put the page of that descriptor, which stays the caller's, in that place; where it is no hints page or cannot be
 * mapped, empty hints. */
void hints_map(const struct shp_hints *place, int descriptor);
/* Put empty hints in that place. */
void hints_clear(const struct shp_hints *place);

/* Map the pulse page of that descriptor, which stays the caller's. NULL: it is none, or cannot be mapped. */
struct shp_pulse *pulse_map(int descriptor);
/* Unmap the page; NULL is allowed. */
void pulse_unmap(struct shp_pulse *pulse);

#endif
