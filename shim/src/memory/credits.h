/* Credits: the bytes of a GPU's memory that the agent counts for this process, and how many of them are in use.
 *
 * Guarantees: on a GPU whose limit is enforced nothing is in use that was not credited before, but for what the driver
 * takes without a call that could be refused (credits_grow), of which the agent is told. Credits that nothing uses go
 * back: at once beyond CREDITS_IDLE_MOST, when the agent calls them back, when the limit is lowered, and when nothing
 * was reserved or returned for CREDITS_IDLE_NS. No lock is held while the agent is asked.
 */
#ifndef SHAREPOD_CREDITS_H
#define SHAREPOD_CREDITS_H

#include <stdbool.h>
#include <stdint.h>

#include "memory/state.h"

/* In use from now on, if the credits in hand or the agent give them. Waits for the agent: for its answer, and for one
 * that is away up to SHAREPOD_MEMORY_WAIT_MS. */
bool credits_reserve(int place, uint64_t bytes);
/* More than the call needs: only if it is to be had at once, without calling back what siblings have idle. */
bool credits_reserve_ahead(int place, uint64_t bytes);
/* From the credits in hand alone. */
bool credits_take(int place, uint64_t bytes);
/* In use already, whatever the limit. */
void credits_grow(int place, uint64_t bytes);
/* No longer in use. */
void credits_return(int place, uint64_t bytes);

/* The tenant's limit on a GPU and what all its processes use of it; false where it is not enforced. */
bool credits_view(int place, uint64_t *limit, uint64_t *used);

/* For the hook thread. */

/* Before the hook thread runs: registers the handler of RECALL, and to be told of lowered limits. `refresh`: see struct
 * memory. */
void credits_prepare(struct memory *memory, struct gpus *gpus, struct session *session, bool (*refresh)(int place));
/* Gives back what has been idle; returns when it wants to be called again at the latest. */
uint64_t credits_step(uint64_t now);

#endif
