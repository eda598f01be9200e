/* Credits: bytes of a GPU's memory that the agent has granted to this process. Idle credits are granted bytes that no
 * allocation uses.
 *
 * Guarantees:
 * - On a GPU whose limit is enforced, the process uses only bytes that the agent has granted before (C1). The one
 *   exception is credits_grow, which reports the bytes to the agent (C5).
 * - Unused credits are returned to the agent (C6).
 * - The lock is not held during a request to the agent (C4). memory/state.h has C1 to C6.
 */
#ifndef SHAREPOD_CREDITS_H
#define SHAREPOD_CREDITS_H

#include <stdbool.h>
#include <stdint.h>

#include "memory/state.h"

/* Reserve bytes from the idle credits, and request the missing bytes from the agent. Waits for the agent's answer, and
 * for an absent agent up to SHAREPOD_MEMORY_WAIT_MS. If this process alone would exceed its limit, each wait is 100 ms
 * at most. Return false if the limit does not allow the bytes. */
bool credits_reserve(int place, uint64_t bytes);
/* Reserve more bytes than a call needs. Return false if the agent cannot grant them at once: no idle credits of sibling
 * processes are recalled for them. */
bool credits_reserve_ahead(int place, uint64_t bytes);
/* Reserve bytes from the idle credits only, without a request to the agent. Return false if they are too few. */
bool credits_take(int place, uint64_t bytes);
/* Charge bytes that the driver has already allocated, even over the limit (C5). */
void credits_grow(int place, uint64_t bytes);
/* Return bytes to the idle credits. Idle credits beyond CREDITS_IDLE_MOST and beyond the bytes that the program usually
 * reuses are returned to the agent at once. After the limit was lowered, all are returned. */
void credits_return(int place, uint64_t bytes);

/* Get the tenant's limit on a GPU, and the memory use of all its processes, from the agent (for at most 1 s). Without
 * an answer, `*used` is this process's use plus the other processes' use by the last answer. Return false if the limit
 * is not enforced. */
bool credits_view(int place, uint64_t *limit, uint64_t *used);

/* Set up struct memory, and register the handlers of RECALL and of lowered limits. Call this before the hook thread
 * runs. `refresh`: see struct memory. */
void credits_prepare(struct memory *memory, struct gpus *gpus, struct session *session,
                     bool (*refresh)(int place, bool wait));
/* Return credits that were idle for CREDITS_LOOK_NS to the agent. Return the time of the next call. Only the hook
 * thread calls this. */
uint64_t credits_step(uint64_t now);

#endif
