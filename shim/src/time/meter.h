/* The meter: keeps the queue of unfinished GPU work short under a metered grant, and foretells when it ends.
 *
 * Guarantees:
 * - Q1 at most FENCES windows of launches are unfinished on a stream that was filled under the meter;
 * - Q2 no launch is begun that is expected to begin after the end of the quantum, but one after a wait of another
 * opening;
 * - Q3 every wait ends: with its fence, with the opening, or after PATIENCE (see meter.c): the kernel that is waited
 * for may itself wait for what this thread does next.
 */
#ifndef SHAREPOD_METER_H
#define SHAREPOD_METER_H

#include "time/gate.h"

/* Begin the window of a stream that is about to be launched into, if the opening is new to it. */
void meter_begin(struct gate *gate, struct slot_stream *entry);

/* Return whether what was launched into the stream is expected to last until the quantum ends (Q2). */
bool meter_holds_back(struct gate *gate, struct slot_stream *entry);

/* Count a launch under a metered grant, outside of its passage. May wait for earlier work (Q1, Q3). */
void meter_launched(const struct gate *gate, struct slot *slot, struct slot_stream *entry);

/* Return when what was launched under metered grants is expected to have finished: a guess from the last fences of all
 * threads. A time that has passed: nothing is known to be unfinished. For the hook thread. */
uint64_t meter_expected_end(const struct gate *gate);

#endif
