/* The hook thread: the hook's only thread of its own in a program. It receives the agent's frames and steps the
 * session, the token, the credits and the pools.
 *
 * Guarantees:
 * - It sleeps until a frame or a deadline comes: no work in the background.
 * - It handles none of the program's signals.
 * - It may run on the processors of the process's first thread, whichever thread has started it.
 * - It runs at least at normal priority, where permitted, even if the thread that starts it has the lowest priority.
 */
#ifndef SHAREPOD_HOOK_THREAD_H
#define SHAREPOD_HOOK_THREAD_H

#include <stdbool.h>

#include "process/freed.h"
#include "session/session.h"
#include "time/gate/gate.h"
#include "time/token.h"

/* The parts of the process that the thread steps. */
struct hook_thread {
    struct gate *gate;
    struct session *session;
    struct token *token;
    struct freed_memory *freed;
    _Atomic bool leaves;   /* the driver is about to end */
    uint64_t leave_by;     /* when it leaves the driver at the latest; 0: not decided yet */
    _Atomic uint32_t left; /* futex: 1 once the thread calls no function of the driver any more */
};

/* Start the thread. False: there are too many in this container, or there is no memory for its stack. */
bool hook_thread_start(struct hook_thread *hook_thread);
/* Stop the thread's driver calls, and wait until none is under way: a second at most, because it may hang in one. */
void hook_thread_leave_driver(struct hook_thread *hook_thread);

#endif
