/* What the daemon's frames mean. For the agent thread. */
#ifndef SHAREPOD_FRAMES_H
#define SHAREPOD_FRAMES_H

#include <stdbool.h>
#include <stddef.h>

#include "session/session.h"

/* Request numbers: questions of threads, handovers and pings, whose answers nobody waits for. */
enum { FRAMES_SEQ_MASK = 0x0fffffff, FRAMES_SEQ_HANDOVER = 0x10000000, FRAMES_SEQ_PING = 0x20000000 };

/* Acts on a frame; false if it breaks the protocol: the connection must end. `descriptor` is -1 or came along, and
 * stays the caller's. */
bool frames_handle(struct session *session, const struct shp_header *header, size_t size, int descriptor);
void frames_unmap_hints(struct session *session);
/* Closes the connection and prepares the next. */
void session_drop(struct session *session);

#endif
