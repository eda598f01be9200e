/* Handlers of the frames about the connection and the tenant's GPUs: WELCOME, LIMITS, RESERVED, MEMORY and REFUSED.
 * token.c handles GRANT and REVOKE, credits.c handles RECALL. */
#ifndef SHAREPOD_FRAMES_H
#define SHAREPOD_FRAMES_H

#include "session/session.h"

/* Register the handlers with the session. */
void frames_register(struct session *session);

#endif
