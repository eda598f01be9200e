/* The meter bounds a thread's queue of unfinished launches on a stream. Under a metered grant it keeps the queue short
 * and predicts when the work ends. It records fences (events behind launches), waits for them and reads the clock. The
 * model in pace.h decides when.
 *
 * Guarantees:
 * - Q1 At most PACE_FENCES windows of a queue are unfinished. PC1, PC4 and PC5 (pace.h) limit their size.
 * - Q2 A launch is held back if the work launched before it is expected to last until the quantum ends. Exceptions: the
 *   first launch of an opening after a complete drain, and launches after an unsuccessful wait (PC3, pace.h).
 * - Q3 Every wait ends: with its fence, with the opening, or after PATIENCE (meter.c). Without PATIENCE, a kernel that
 *   waits for this thread's next action would never end.
 * - Q4 Before the program puts ungated work, such as a copy from the host, behind a metered launch into a stream, the
 *   hook records a fence between the two. So no drain waits for the ungated work (D3, drain.h).
 * - Q5 In a queue that is kept short, a window begins when the window before it is about to end (PC4, pace.h).
 * - Q6 A program may put a wait into a stream: for a value, a semaphore or a host function. The fence behind that wait
 *   may not pass until this thread continues. So no fence is recorded behind an unfinished wait (waits.h), and launches
 *   pass. If they are expected to take two windows of a wide queue or more, the thread waits for the end of the wait,
 *   at most for PATIENCE and once for each wait. After the first such wait of the process, waits for events count too.
 *   In default streams, one fence is recorded behind the wait. In a wide queue the thread does not wait for that fence,
 *   or only until 50 ms after it is due, as above. In other queues the thread's wait for it is unsuccessful 5 ms after
 *   the fence is due, or 25 ms after it while the duration of launches is unknown.
 */
#ifndef SHAREPOD_METER_H
#define SHAREPOD_METER_H

#include "time/gate/gate.h"
#include "time/streams.h"

/* Before a launch into a queue: if this is the queue's first launch since the gate was opened or got new terms, begin a
 * new opening in its model. `word`: the gate word. */
void meter_begin(struct gate *gate, struct streams *streams, struct queue *queue, uint32_t word);
/* Return true if the next launch into a queue that is kept short must wait, because it is too early (Q5). */
bool meter_is_early(struct gate *gate, struct slot *slot, struct queue *queue);
/* Wait until the next launch is due, or until the opening ends. Call this outside a passage. */
void meter_wait_due(const struct gate *gate, struct slot *slot, struct queue *queue);
/* Return whether the next launch must be held back, because the work launched into the stream is expected to last until
 * the quantum ends (Q2). */
bool meter_holds_back(struct gate *gate, struct queue *queue);
/* After a launch, record the fence that is due, and plan the next window. Call this outside the launch's passage. May
 * wait for earlier work (Q1, Q3). */
void meter_launched(const struct gate *gate, struct streams *streams, struct slot *slot, struct queue *queue);
/* Record a fence behind the thread's launches into its own default stream of the current context. Call this before the
 * thread waits at the gate, because no other thread can query that stream. No fence is recorded behind a wait of the
 * program, because the stream may be full. */
void meter_before_wait(const struct gate *gate, struct streams *streams, const struct slot *slot);
/* Record fences behind the launches into this stream and into streams that wait for it, before ungated work is put
 * behind them (Q4). `slot`: the thread's slot, or NULL if it has none. */
void meter_before_ungated(const struct gate *gate, struct streams *streams, struct slot *slot, CUstream stream,
                          bool per_thread);
/* Record fences behind the launches into all streams of a context, before work that does not pass the gate (Q4). */
void meter_before_ungated_context(const struct gate *gate, struct streams *streams, CUcontext context);

/* Return the time at which the work launched under metered grants is expected to end, estimated from the last fences of
 * all threads. A time in the past means that no work is known to be unfinished. Only the hook thread calls this. */
uint64_t meter_expected_end(const struct gate *gate);
/* Return whether a thread has launched work in this opening whose duration no fence has shown yet. Only the hook thread
 * calls this. */
bool meter_end_unknown(const struct gate *gate);

#endif
