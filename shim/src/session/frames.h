/* Handlers of the frames that concern the connection and the tenant's GPUs: WELCOME, LIMITS, RESERVED, MEMORY, REFUSED.
 * GRANT and REVOKE are token.c's, RECALL is credits.c's. */
#ifndef SHAREPOD_FRAMES_H
#define SHAREPOD_FRAMES_H

#include "session/session.h"

/* Registers the handlers with the session. */
void frames_register(struct session *session);

#endif
