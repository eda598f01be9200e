/* The meter: bounds the queue of unfinished GPU work, keeps it short under a metered grant, and predicts its end.
 * pace.h decides; the meter records fences, waits for them and reads the clock.
 *
 * Guarantees:
 * - Q1 at most PACE_FENCES windows of launches are unfinished on a stream, wide ones (PC5) where the grant is not
 *   metered.
 * - Q2 no launch begins that is expected to run after the end of the quantum, except one after a wait of another
 *   opening.
 * - Q3 every wait ends: with its fence, with the opening, or after PATIENCE (see meter.c). The awaited kernel may
 *   itself wait for this thread's next action.
 * - Q4 before ungated work is put behind a metered launch, there is a fence behind that launch (D3).
 * - Q5 in a queue that is kept short, a window of launches begins when the one before is about to end (PC4).
 * - Q6 a tenant that holds alone does not wait for a fence behind a wait that the program has put into the stream,
 *   while fewer than two windows are unfinished. Such waits are for a value, a semaphore or a function, and from the
 *   first of these on also for an event. Beyond that it waits for a window longer than the launches take, once for each
 *   such wait.
 */
#ifndef SHAREPOD_METER_H
#define SHAREPOD_METER_H

#include "time/gate/gate.h"
#include "time/streams.h"

/* Begin the opening for the queue of a stream that is about to be launched into, if it or its terms are new to the
 * queue. `word`: of the gate. */
void meter_begin(struct gate *gate, struct streams *streams, struct queue *queue, uint32_t word);
/* Return whether the next launch into the stream is too early for a queue that is kept short (Q5). */
bool meter_is_early(struct gate *gate, struct slot *slot, struct queue *queue);
/* Wait until it is not, or until the opening ends. Outside of a passage. */
void meter_wait_due(const struct gate *gate, struct slot *slot, struct queue *queue);
/* Return whether the work launched into the stream is expected to last until the quantum ends (Q2). */
bool meter_holds_back(struct gate *gate, struct queue *queue);
/* Go on after a launch that is due, outside of its passage. May wait for earlier work (Q1, Q3). */
void meter_launched(const struct gate *gate, struct slot *slot, struct queue *queue);
/* Fence the thread's launches into its own default stream of the current context, before it waits at the gate: no other
 * thread can detect their end. Behind a wait of the program's there is no fence: the stream may be full. */
void meter_before_wait(const struct gate *gate, struct streams *streams, const struct slot *slot);
/* Fence the launches into that stream, or into streams that wait for it, before ungated work is put behind them (Q4).
 * `slot`: NULL: the thread has none. */
void meter_before_ungated(const struct gate *gate, struct streams *streams, struct slot *slot, CUstream stream,
                          bool per_thread);
/* The same for all streams of a context. */
void meter_before_ungated_context(const struct gate *gate, struct streams *streams, CUcontext context);

/* Return when the work launched under metered grants is expected to end, estimated from the last fences of all threads.
 * A time in the past: no work is known to be unfinished. For the hook thread. */
uint64_t meter_expected_end(const struct gate *gate);
/* Return whether a thread has launched work in this opening whose duration no fence has shown yet. For the hook
 * thread. */
bool meter_end_unknown(const struct gate *gate);

#endif
