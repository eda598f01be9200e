/* The meter: keeps the queue of unfinished GPU work short under a metered grant, and bounded under any, and foretells
 * when it ends. pace.h decides; the meter records fences, waits for them and reads the clock.
 *
 * Guarantees:
 * - Q1 at most PACE_FENCES windows of launches are unfinished on a stream, wide ones (PC5) where the grant is not
 * metered;
 * - Q2 no launch is begun that is expected to begin after the end of the quantum, but one after a wait of another
 * opening;
 * - Q3 every wait ends: with its fence, with the opening, or after PATIENCE (see meter.c): the kernel that is waited
 * for may itself wait for what this thread does next;
 * - Q6 a tenant that is alone does not wait for a fence behind a wait that the program has put into the stream (for a
 * value, a semaphore, a function; from the first of these on, also for an event), while less than two windows are
 * unfinished; beyond that for a window longer than the launches take, once for each such wait;
 * - Q5 in a queue that is kept short a window of launches is begun when the one before is about to end (PC4);
 * - Q4 before work that is not gated is put behind a metered launch, there is a fence behind that launch (D3).
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
/* Return whether what was launched into the stream is expected to last until the quantum ends (Q2). */
bool meter_holds_back(struct gate *gate, struct queue *queue);
/* Go on after a launch that is due, outside of its passage. May wait for earlier work (Q1, Q3). */
void meter_launched(const struct gate *gate, struct slot *slot, struct queue *queue);
/* Fence what the thread has launched into its own default stream of the current context, before it waits at the gate:
 * no other thread can find out whether that has ended. */
void meter_before_wait(const struct gate *gate, struct streams *streams, const struct slot *slot);
/* Fence what was launched into the stream of that name, or into streams that wait for it, before work that is not gated
 * is put behind it (Q4). `slot`: NULL: the thread has none. */
void meter_before_ungated(const struct gate *gate, struct streams *streams, struct slot *slot, CUstream stream,
                          bool per_thread);
/* The same for all streams of a context. */
void meter_before_ungated_context(const struct gate *gate, struct streams *streams, CUcontext context);

/* Return when what was launched under metered grants is expected to have finished: a guess from the last fences of all
 * threads. A time that has passed: nothing is known to be unfinished. For the hook thread. */
uint64_t meter_expected_end(const struct gate *gate);
/* Return whether a thread has launched, in this opening, what no fence has told the duration of yet. For the hook
 * thread. */
bool meter_end_unknown(const struct gate *gate);

#endif
