/* The hook thread: the hook's one thread of its own in the program. It receives the agent's frames and steps the
 * session, the token and the credits.
 */
#ifndef SHAREPOD_HOOK_THREAD_H
#define SHAREPOD_HOOK_THREAD_H

#include <stdbool.h>

#include "session/session.h"
#include "time/gate.h"
#include "time/token.h"

/* What the thread steps. */
struct hook_thread {
    struct gate *gate;
    struct session *session;
    struct token *token;
};

/* Starts the thread; false: there are too many in this container, or there is no memory for its stack. */
bool hook_thread_start(struct hook_thread *hook_thread);

#endif
