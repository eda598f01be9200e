/* The bounded queue of a metered grant: how much unfinished work a thread may put on a stream. */
#ifndef SHAREPOD_METER_H
#define SHAREPOD_METER_H

#include "time/gate.h"

/* A stream is about to be launched into: at the beginning of an opening what is known of it is brought up to date. */
void meter_begin(struct gate *gate, struct slot_stream *entry);

/* Whether what was launched into the stream is expected to last until the quantum ends, so that nothing more fits. */
bool meter_holds_back(struct gate *gate, struct slot_stream *entry);

/* After a launch under a metered grant, outside of its passage. May wait for earlier work. */
void meter_launched(const struct gate *gate, struct slot *slot, struct slot_stream *entry);

/* When what was launched under metered grants is expected to have finished, of sys_now: a guess from the last fences of
 * all threads; a time that has passed: nothing is known to be unfinished. For the hook thread. */
uint64_t meter_expected_end(const struct gate *gate);

#endif
