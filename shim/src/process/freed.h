/* Linear memory that the program has freed on a stream (cuMemFreeAsync): it is in use until the stream reaches the
 * free.
 *
 * Guarantees:
 * - Its charge is returned once an event behind the free has completed, or the context of the stream has ended.
 * - The freeing thread never waits: the stream may wait for that thread's next action.
 * - An allocation waits for all such events, a second at most, before it is refused. When the agent recalls credits,
 *   the events are queried.
 */
#ifndef SHAREPOD_FREED_H
#define SHAREPOD_FREED_H

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/slab.h"
#include "base/sys.h"
#include "memory/charge.h"
#include "time/streams.h"

struct freed; /* one piece of memory */

struct freed_memory {
    struct lock lock;
    struct slab slab;
    struct freed *_Atomic first;
    uint64_t next_look; /* the hook thread's */
};

/* Return the charge of memory that was freed on that stream once the stream has reached the free. After the driver's
 * call; `stream` by its one name. If no event can be recorded, the charge is returned at once. */
void freed_add(struct freed_memory *freed, struct streams *streams, struct allocation *allocation, CUstream stream);
/* Return the charges of all memory that is free by now. True if there was any. */
bool freed_refresh(struct freed_memory *freed, struct streams *streams);
/* The same, but wait until all of it is free, a second at most: a stream may wait for this very thread. */
bool freed_await(struct freed_memory *freed, struct streams *streams);
/* Do the same at regular times while there is any. Return when to call again. Hook thread only. */
uint64_t freed_step(struct freed_memory *freed, struct streams *streams, uint64_t now);

#endif
