/* Credits: the bytes of a GPU's memory that the agent counts for this process, and how many of them are in use.
 *
 * Guarantees:
 * - On a GPU whose limit is enforced, bytes are in use only after the agent has credited them (C1). The one exception
 *   is credits_grow, of which the agent is told (C5).
 * - Credits that nothing uses go back to the agent (C6).
 * - The lock is not held while the agent is asked (C4).
 */
#ifndef SHAREPOD_CREDITS_H
#define SHAREPOD_CREDITS_H

#include <stdbool.h>
#include <stdint.h>

#include "memory/state.h"

/* Put bytes to use: of the idle credits, and what is missing of new ones. Waits for the agent's answer, and up to
 * SHAREPOD_MEMORY_WAIT_MS for an agent that is away, unless this process alone would be over its limit. False: the
 * limit does not allow the bytes. */
bool credits_reserve(int place, uint64_t bytes);
/* Put bytes to use that are more than the call needs. False unless the agent has them at once, without recalling idle
 * credits of sibling processes. */
bool credits_reserve_ahead(int place, uint64_t bytes);
/* Put bytes to use of the idle credits alone. Asks nobody. */
bool credits_take(int place, uint64_t bytes);
/* Count bytes that the driver has taken already, whatever the limit (C5). */
void credits_grow(int place, uint64_t bytes);
/* Count bytes as idle. If more are idle than CREDITS_IDLE_MOST and what the program is used to take again, those beyond
 * the latter go back at once; after a lowered limit all do. */
void credits_return(int place, uint64_t bytes);

/* Get the tenant's limit on a GPU and what all its processes use, asked of the agent (1 s at most; without an answer:
 * what this process uses and its siblings used at the last answer). False where the limit is not enforced. */
bool credits_view(int place, uint64_t *limit, uint64_t *used);

/* Set struct memory up and register the handlers of RECALL and of lowered limits. Before the hook thread runs.
 * `refresh`: see struct memory. */
void credits_prepare(struct memory *memory, struct gpus *gpus, struct session *session,
                     bool (*refresh)(int place, bool wait));
/* Give back credits that lay idle for CREDITS_LOOK_NS. Returns the time by which to call again. Hook thread
 * only. */
uint64_t credits_step(uint64_t now);

#endif
