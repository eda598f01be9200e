/* The drain waits for the GPU work of a grant, by events and queries. Only the hook thread calls these functions,
 * except where noted.
 *
 * Guarantees, given G1 (nothing is launched between drain_begin and drain_end) and P2 (every stream is registered):
 * - D1 When drain_poll returns true, all work launched under the grant has finished, except by D6.
 * - D2 No call waits for the GPU.
 * - D3 The drain waits only for launches that passed the gate. If a stream's last launch was metered, the drain does
 *   not wait for ungated work behind it: host copies, functions of the program, and waits for values or other streams.
 * - D4 No event of the hook orders streams that the program has not ordered. In the legacy stream the hook records an
 *   event only next to a launch or other work that the program puts into that stream. In a per-thread default stream,
 *   only its own thread records events. Exceptions: a capture in a stream that the legacy stream waits for, while
 *   another capture is open or before CUDA 12.5; and before CUDA 12.5, threads that have no queue or have ended.
 * - D5 The hook thread records no event in a stream of the program, because the stream may be full. In a stream that
 *   has a wait of the program, only threads that launch into the stream record events. The drain sees the end of its
 *   work by an event behind all work of the context. Without such an event (before CUDA 12.5, or next to an open
 *   capture) the drain queries the stream; if the stream captures or has been destroyed, after the captures. Before
 *   CUDA 12.5 no drain waits for the work of a destroyed stream that has a wait.
 * - D6 No drain waits for launches behind an unfinished wait of the program (waits.h): they do not run, and perhaps
 *   only the next launch of the program ends that wait. drain_left finds them when they run. Exceptions: default
 *   streams, waits inside a graph, launches of threads without a queue, and waits next to which several threads launch
 *   into the stream. Such launches may be in front of the wait, so the drain waits for all work of the stream.
 */
#ifndef SHAREPOD_DRAIN_H
#define SHAREPOD_DRAIN_H

#include <stdbool.h>

#include "time/streams.h"

enum drain_left { DRAIN_LEFT_NOTHING, DRAIN_LEFT_WAITS, DRAIN_LEFT_RUNS };

/* Record events behind metered launches that ungated work is about to follow (D3), unless fences of their threads are
 * behind them. The events are recorded in the stream with this name. If `named` is the legacy stream, they are recorded
 * in all streams of the context `current` that wait for it, and behind all work of that context. `current` NULL: only
 * one context exists. May wait for room in these streams, as the ungated work does. Any thread may call this, without
 * holding a lock. */
void drain_before_ungated(struct streams *streams, CUstream named, CUcontext current);
/* Do what drain_before_ungated does, in the streams of a context; `context` NULL: of all contexts. `all`: also in
 * streams that the legacy stream does not wait for. */
void drain_before_ungated_context(struct streams *streams, CUcontext context, bool all);
/* Begin the drain: record events behind registered work that has no event behind it, where that is possible. */
void drain_begin(struct streams *streams);
/* Return whether all registered work has finished. */
bool drain_poll(struct streams *streams);
/* Return the state of the launches for which the last drain did not wait, because a wait of the program delays them
 * (D6): none are left, all still wait, or some run. */
enum drain_left drain_left(struct streams *streams);
/* Return true if the launches into the queue's stream before the start of the drain have finished, or the stream has
 * ended. Any thread may call this. */
bool drain_over(struct streams *streams, const struct queue *queue);
/* End the drain: no work is registered any more. `cleared` false: a thread is still inside a launch, which may go into
 * any of the drained streams. Then these streams stay registered, and the next drain waits for them too. */
void drain_end(struct streams *streams, bool cleared);

#endif
