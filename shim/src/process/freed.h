/* Linear memory that the program has freed on a stream (cuMemFreeAsync). It stays allocated until the stream reaches
 * the free.
 *
 * Guarantees:
 * - The charge of the memory is returned after an event behind the free has completed, or the stream's context has
 *   ended.
 * - The thread that frees never waits, because the stream may be waiting for that thread's next action.
 * - Before the hook refuses an allocation, it waits for all such events, for at most 1 s. When the agent recalls
 *   credits, the hook queries the events.
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

struct freed; /* entry of one freed allocation */

struct freed_memory {
    struct lock lock;
    struct slab slab;
    struct freed *_Atomic first;
    uint64_t next_look; /* time of the next check; only the hook thread uses it */
};

/* After a successful cuMemFreeAsync: return the charge of the memory later, once the stream has reached the free. If no
 * event can be recorded, return it at once. `stream`: name of the stream, see stream_named. */
void freed_add(struct freed_memory *freed, struct streams *streams, struct allocation *allocation, CUstream stream);
/* Return the charges of all freed memory whose stream has reached the free. Return true if there was any. */
bool freed_refresh(struct freed_memory *freed, struct streams *streams);
/* As freed_refresh, but wait until all streams have reached the free, for at most 1 s: a stream may be waiting for the
 * calling thread. */
bool freed_await(struct freed_memory *freed, struct streams *streams);
/* Call freed_refresh at regular times while any freed memory is left. Return the time of the next call. Only the hook
 * thread calls this. */
uint64_t freed_step(struct freed_memory *freed, struct streams *streams, uint64_t now);

#endif
