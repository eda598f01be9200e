/* The bounded queue of a metered grant: how much unfinished work a thread may put on a stream. */
#ifndef SHAREPOD_METER_H
#define SHAREPOD_METER_H

#include "gate.h"

/* After a launch under a metered grant, outside of its passage. May wait for earlier work. */
void meter_launched(struct slot *slot, struct slot_stream *entry);

/* When what was launched under metered grants is expected to have finished, of sys_now: a guess from the last fences of
 * all threads; a time that has passed: nothing is known to be unfinished. For the agent thread. */
uint64_t meter_expected_end(struct gate *gate);

#endif
