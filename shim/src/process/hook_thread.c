/* The loop of the hook thread, and its start by the pthread functions of whatever C library is there. */
#include "process/hook_thread.h"

#include <sys/prctl.h>

#include "base/elf.h"
#include "base/sys.h"
#include "memory/credits.h"
#include "memory/pools/pool_memory.h"

/* One turn: 1. connect or drop the agent; 2. step the token, the pools, the credits; 3. sleep until the earliest of
 * what is due, and handle the frames that come. */
static void *run(void *argument) {
    const struct hook_thread *thread = argument;
    struct session *session = thread->session;
    sys_call(SYS_prctl, PR_SET_NAME, (long)"sharepod", 0, 0, 0, 0);
    sys_call(SYS_prctl, PR_SET_TIMERSLACK, 1000, 0, 0, 0, 0);
    for (;;) {
        uint64_t now = sys_now();
        session->hello_flags = thread->gate->no_membarrier ? SHP_HELLO_NO_MEMBARRIER : 0;
        session_step(session, now);
        uint64_t due = token_step(thread->token, now);
        uint64_t others[] = {session_deadline(session), pools_step(now), credits_step(now)};
        for (unsigned i = 0; i < sizeof others / sizeof *others; i++)
            due = others[i] < due ? others[i] : due;
        session_wait(session, due);
    }
    return NULL;
}

/* pthread_attr_t: larger than that of any C library. */
union attributes {
    char bytes[256];
    uint64_t aligned;
};

/* Return attributes with a stack of 1 MiB at least: the program may have made the default small for the many threads of
 * its own, and this one calls the driver. NULL: the default will do. */
static const void *choose_stack(union attributes *attributes) {
    const size_t least = 1 << 20;
    size_t size = 0;
    int (*begin)(void *) = (int (*)(void *))object_libc_symbol("pthread_attr_init");
    int (*get)(const void *, size_t *) =
        (int (*)(const void *, size_t *))object_libc_symbol("pthread_attr_getstacksize");
    int (*set)(void *, size_t) = (int (*)(void *, size_t))object_libc_symbol("pthread_attr_setstacksize");
    if (begin == NULL || get == NULL || set == NULL || begin(attributes) != 0)
        return NULL;
    return get(attributes, &size) == 0 && size < least && set(attributes, least) == 0 ? attributes : NULL;
}

/* All signals are blocked in the thread, but the two that the C library sends to every thread: setuid waits until all
 * threads have answered. */
bool hook_thread_start(struct hook_thread *hook_thread) {
    int (*create)(unsigned long *, const void *, void *(*)(void *), void *) =
        (int (*)(unsigned long *, const void *, void *(*)(void *), void *))object_libc_symbol("pthread_create");
    int (*detach)(unsigned long) = (int (*)(unsigned long))object_libc_symbol("pthread_detach");
    uint64_t all = ~(3ull << 31), before = 0; /* all but 32 and 33 */
    unsigned long thread;
    union attributes attributes;
    if (create == NULL)
        return false;
    const void *chosen = choose_stack(&attributes);
    sys_call(SYS_rt_sigprocmask, 2 /* SIG_SETMASK */, (long)&all, (long)&before, sizeof all, 0, 0);
    bool created = create(&thread, chosen, run, hook_thread) == 0;
    sys_call(SYS_rt_sigprocmask, 2, (long)&before, 0, sizeof all, 0, 0);
    if (created && detach != NULL)
        detach(thread);
    return created;
}
