/* The hook thread: the one thread of the hook's own in a program. It receives the agent's frames and steps the session,
 * the token, the credits and the pools.
 *
 * Guarantees:
 * - it sleeps until something has come or is due: no work in the background;
 * - none of the program's signals is handled in it.
 */
#ifndef SHAREPOD_HOOK_THREAD_H
#define SHAREPOD_HOOK_THREAD_H

#include <stdbool.h>

#include "session/session.h"
#include "time/gate.h"
#include "time/token.h"

/* The parts of the process that the thread steps. */
struct hook_thread {
    struct gate *gate;
    struct session *session;
    struct token *token;
};

/* Start the thread. False: there are too many in this container, or there is no memory for its stack. */
bool hook_thread_start(struct hook_thread *hook_thread);

#endif
