/* Waits of the program in its streams: for a value, a semaphore, a host function, or an event behind such a wait. Work
 * behind an unfinished wait does not run. Perhaps only a later launch of the program ends the wait, so no drain
 * waits for it (D6, drain.h).
 *
 * The driver calls a function of the program through the hook. Of any other wait an event shows whether it has passed:
 * the launching thread records the event before its first launch behind the wait. While a wait is unfinished, the hook
 * puts no fence behind it: the stream may be full, and its thread may be about to end the wait.
 */
#ifndef SHAREPOD_WAITS_H
#define SHAREPOD_WAITS_H

#include <stdbool.h>

#include "time/streams.h"

/* Record that the following call puts a wait into the stream with this name in this context. Fences behind the wait may
 * not pass until this thread makes another call. A wait in the legacy stream delays all streams of the context.
 * `context` NULL: every context that has the stream; for a default stream, the current context. Return the new entry of
 * the wait; NULL: the wait has no entry. `call`: the function of the program that the stream waits for, or NULL. An
 * entry for a function owns `call`. */
struct program_wait *waits_hold(struct streams *streams, CUstream stream, CUcontext context, struct host_call *call);
/* Do what waits_hold does, before the launch of a graph that contains a wait. Such a wait has no entry, because no
 * drain may ignore the rest of the graph. */
void waits_hold_launch(struct streams *streams, CUstream stream);
/* Note that the driver's call after waits_hold or waits_hold_launch has returned. */
void waits_held(struct streams *streams);

/* Before a wait in this stream: if the row of the stream has WAIT_PLACES events, wait until one of them has passed,
 * until the opening ends, or for 10 ms. */
void waits_make_room(struct streams *streams, const struct gate *gate, CUstream stream);
/* Record the event `before` of a wait in its stream, in the thread that puts the wait into this stream. `wait` NULL: do
 * nothing. */
void waits_fence(struct streams *streams, struct program_wait *wait, CUstream stream);
/* Record the event that queue->mark requests, inside a passage, before the launch. */
void waits_mark(struct streams *streams, struct queue *queue);
/* Return whether launches of the queue are behind a wait that has not passed. Then set `*behind`, unless it is NULL, to
 * the number of launches into the stream behind the oldest such wait. Only the queue's thread calls this. */
bool waits_block(struct streams *streams, struct queue *queue, uint64_t *behind);

/* Return whether a stream may wait for the program, so that an event may, too. */
static inline bool waits_may_hold(struct streams *streams) {
    return atomic_load(&streams->holds) || atomic_load(&streams->functions) > 0;
}

/* Mark a wait whose call the driver has refused, so that the next check removes it. */
void waits_cancel(struct streams *streams, struct program_wait *wait);
/* Return a copy of this call that lasts until it has returned and its wait is over; NULL: no memory. */
struct host_call *waits_keep_call(struct streams *streams, const struct host_call *call);
/* Free a call that belongs to no wait and that the driver will not make. */
void waits_free_call(struct streams *streams, struct host_call *call);
/* Note that the function has returned, or that it will not be called. */
void waits_call_returned(struct streams *streams, struct host_call *call);

/* Return whether the work before the row's oldest wait has finished, as far as no fence of the row shows it. The caller
 * holds the registry's lock. */
bool waits_reached(const struct known_stream *row, const struct program_wait *wait);

/* Return whether a stream of the context waits for the program. An event behind all work of the context may then pass
 * only after the end of that wait. `fence`: row whose event this is, so that only older waits of other streams count;
 * NULL: all waits count. */
bool waits_left(struct streams *streams, const struct known_context *known, const struct known_stream *fence);

#endif
