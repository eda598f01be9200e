/* The hook thread: the only thread that the hook starts in a program. It receives the agent's frames and runs the steps
 * of the session, the token, the credits and the pools.
 *
 * Guarantees:
 * - It sleeps until a frame arrives or a deadline passes.
 * - It blocks all signals, except two of the C library's own, so no signal handler of the program runs in it.
 * - It may run on all processors on which the process's first thread may run.
 * - It runs at normal priority or higher, where permitted, even if the thread that starts it has the lowest priority.
 */
#ifndef SHAREPOD_HOOK_THREAD_H
#define SHAREPOD_HOOK_THREAD_H

#include <stdbool.h>

#include "process/freed.h"
#include "session/session.h"
#include "time/gate/gate.h"
#include "time/token.h"

/* The parts of the process whose steps the thread runs. */
struct hook_thread {
    struct gate *gate;
    struct session *session;
    struct token *token;
    struct freed_memory *freed;
    _Atomic bool leaves;   /* the driver is about to end */
    uint64_t leave_by;     /* time after which the thread calls no function of the driver; 0: not decided yet */
    _Atomic uint32_t left; /* futex: 1 once the thread calls no function of the driver any more */
};

/* Start the thread. Return false if this container has too many threads, or there is no memory for the stack. */
bool hook_thread_start(struct hook_thread *hook_thread);
/* Stop the thread's driver calls, and wait until none is under way. Wait at most 1 s, because a driver call may never
 * return. */
void hook_thread_leave_driver(struct hook_thread *hook_thread);

#endif
