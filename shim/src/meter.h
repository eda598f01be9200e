/* The bounded queue of a metered grant: how much unfinished work a thread may put on a stream. */
#ifndef SHAREPOD_METER_H
#define SHAREPOD_METER_H

#include "gate.h"

/* After a launch under a metered grant, outside of its passage. May wait for earlier work. */
void meter_launched(struct slot_stream *entry);

#endif
