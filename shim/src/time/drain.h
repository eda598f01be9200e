/* Waiting for the GPU work of a grant, by events. For the hook thread. */
#ifndef SHAREPOD_DRAIN_H
#define SHAREPOD_DRAIN_H

#include <stdbool.h>

#include "time/streams.h"

/* Records events behind all registered work. */
void drain_begin(struct streams *streams);
/* Returns whether all of that work has finished. */
bool drain_poll(struct streams *streams);
/* Ends the drain: no work is registered any more. */
void drain_end(struct streams *streams);

#endif
