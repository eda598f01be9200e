/* The drain: waiting for the GPU work of a grant, by events. For the hook thread, but for drain_over.
 *
 * Guarantees, given G1 (nothing is launched between drain_begin and drain_end) and P2 (every stream is registered):
 * - D1 when drain_poll returns true, all work launched under the grant has finished;
 * - D2 no call waits for the GPU;
 * - D3 only launches that passed the gate are waited for: what a stream has behind its last launch (host copies,
 *   functions of the program, waits for values or for other streams) is not, where the launch was metered;
 * - D4 no event orders streams of the program that the program has not ordered: the legacy stream gets one only next to
 *   a launch or other work that the program puts into it, a per-thread default stream only from its own thread.
 *   Exceptions: a capture in a stream that the legacy stream waits for, while another one is open or before CUDA 12.5;
 *   and, before CUDA 12.5, threads that have no queue or have ended.
 */
#ifndef SHAREPOD_DRAIN_H
#define SHAREPOD_DRAIN_H

#include <stdbool.h>

#include "time/streams.h"

/* Record events behind launches under metered grants that work past the gate is about to delay (D3), unless their
 * threads' fences are behind them. They are recorded in the stream of that name and in default streams of its context;
 * in all streams of the current context, if that is the legacy stream. `current`: NULL: there is one context. For any
 * thread, with no lock. */
void drain_before_ungated(struct streams *streams, CUstream named, CUcontext current);
/* The same for all streams of a context; NULL: of any. */
void drain_before_ungated_context(struct streams *streams, CUcontext context);
/* Record events behind all registered work that has none behind it. */
void drain_begin(struct streams *streams);
/* Return whether all of that work has finished. */
bool drain_poll(struct streams *streams);
/* Return whether launches into the queue's stream before the start of the drain have finished, or their stream has
 * ended. For any thread. */
bool drain_over(struct streams *streams, const struct queue *queue);
/* End the drain: no work is registered any more. `cleared` false: a thread is inside a launch still, into one of the
 * streams that were drained, so that the next drain waits for each of these too. */
void drain_end(struct streams *streams, bool cleared);

#endif
