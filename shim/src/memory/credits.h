/* Credits: the bytes of a GPU's memory that the agent counts for this process, and how many of them are in use.
 *
 * Guarantees:
 * - On a GPU whose limit is enforced, bytes are in use only after the agent has credited them (C1). The one exception
 *   is credits_grow, which is reported to the agent (C5).
 * - Unused credits are returned to the agent (C6).
 * - The lock is not held during a request to the agent (C4).
 */
#ifndef SHAREPOD_CREDITS_H
#define SHAREPOD_CREDITS_H

#include <stdbool.h>
#include <stdint.h>

#include "memory/state.h"

/* Use bytes: from the idle credits, and the rest from new ones. Waits for the agent's answer, and up to
 * SHAREPOD_MEMORY_WAIT_MS for an absent agent, unless this process by itself would exceed its limit. False: the limit
 * does not allow the bytes. */
bool credits_reserve(int place, uint64_t bytes);
/* Put bytes to use that are more than the call needs. False unless the agent has them at once, without recalling idle
 * credits of sibling processes. */
bool credits_reserve_ahead(int place, uint64_t bytes);
/* Use bytes from the idle credits only, without a request to the agent. */
bool credits_take(int place, uint64_t bytes);
/* Count bytes that the driver has taken already, whatever the limit (C5). */
void credits_grow(int place, uint64_t bytes);
/* Count bytes as idle. Idle bytes beyond CREDITS_IDLE_MOST and beyond the program's usual reuse are returned at once;
 * after a lowered limit all are. */
void credits_return(int place, uint64_t bytes);

/* Get the tenant's limit on a GPU and the usage of all its processes from the agent (1 s at most). Without an answer:
 * this process's usage plus its siblings' at the last answer. False where the limit is not enforced. */
bool credits_view(int place, uint64_t *limit, uint64_t *used);

/* Set struct memory up and register the handlers of RECALL and of lowered limits. Before the hook thread runs.
 * `refresh`: see struct memory. */
void credits_prepare(struct memory *memory, struct gpus *gpus, struct session *session,
                     bool (*refresh)(int place, bool wait));
/* Give back credits that lay idle for CREDITS_LOOK_NS. Returns the time by which to call again. Hook thread
 * only. */
uint64_t credits_step(uint64_t now);

#endif
