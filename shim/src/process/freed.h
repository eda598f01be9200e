/* Linear memory that the program has freed on a stream (cuMemFreeAsync). It is in use until the stream reaches the
 * free.
 *
 * Guarantees:
 * - The charge of the memory is returned after an event behind the free has completed, or the stream's context has
 *   ended.
 * - The thread that frees never waits, because the stream may be waiting for that thread's next action.
 * - Before an allocation is refused, it waits for all such events, at most 1 s. When the agent recalls credits, the
 *   hook queries the events.
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

struct freed; /* one piece of freed memory */

struct freed_memory {
    struct lock lock;
    struct slab slab;
    struct freed *_Atomic first;
    uint64_t next_look; /* time of the next check; only the hook thread uses it */
};

/* Return the charge of memory that was freed on this stream, after the stream has reached the free. Call this after the
 * driver's call. `stream`: its name, see stream_named. If no event can be recorded, the charge is returned at once. */
void freed_add(struct freed_memory *freed, struct streams *streams, struct allocation *allocation, CUstream stream);
/* Return the charges of all memory whose free the stream has reached. Return whether there was any. */
bool freed_refresh(struct freed_memory *freed, struct streams *streams);
/* As freed_refresh, but wait until all streams have reached the free, for at most 1 s: a stream may be waiting for the
 * calling thread. */
bool freed_await(struct freed_memory *freed, struct streams *streams);
/* Call freed_refresh at regular times while any freed memory is left. Return the time of the next call. Only the hook
 * thread calls this. */
uint64_t freed_step(struct freed_memory *freed, struct streams *streams, uint64_t now);

#endif
