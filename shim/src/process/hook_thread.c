/* Loop of the hook thread, and its start by the pthread functions of the program's C library. */
#include "process/hook_thread.h"

#include <sys/prctl.h>

#include "base/elf.h"
#include "base/sys.h"
#include "memory/refresh.h"

/* Longest time, in ns, that the exit of a program is delayed until its GPU work has drained. Most programs have already
 * waited for their work. */
#define LEAVE_TIME (100 * SYS_MS)

#define SLICE 100000ull /* ns: the shortest scheduling slice that Linux accepts; one loop iteration takes less */

enum { MASK_WORDS = 128 }; /* words of 64 processors each: as many as Linux supports */

/* Let the hook thread run on all processors of the process. It inherits the affinity of the program's thread that
 * started it, which may be bound to fewer. */
static void run_anywhere(void) {
    uint64_t mask[MASK_WORDS];
    long size = sys_call(SYS_sched_getaffinity, sys_process_id(), sizeof mask, (long)mask, 0, 0, 0);
    if (size > 0)
        sys_call(SYS_sched_setaffinity, 0, size, (long)mask, 0, 0, 0);
}

/* Argument of sched_setattr, as in linux/sched/types.h since Linux 3.14. */
struct schedule {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
};

/* Set the default policy and a nice value of at most 0, instead of the values of the starting thread. If the container
 * may not lower a nice value, set only a short slice: it makes the thread run soon after it wakes (Linux 6.12 and
 * newer). A real-time policy is kept, because the program's real-time threads would starve a thread with the default
 * policy. */
static void run_promptly(void) {
    enum { OTHER = 0, BATCH = 3, IDLE = 5 };
    struct schedule given = {0}, wanted;
    if (sys_call(SYS_sched_getattr, 0, (long)&given, sizeof given, 0, 0, 0) != 0 ||
        (given.policy != OTHER && given.policy != BATCH && given.policy != IDLE))
        return;
    given.runtime = SLICE;
    wanted = given;
    wanted.policy = OTHER;
    wanted.nice = given.nice > 0 ? 0 : given.nice;
    if (sys_call(SYS_sched_setattr, 0, (long)&wanted, 0, 0, 0, 0) != 0)
        sys_call(SYS_sched_setattr, 0, (long)&given, 0, 0, 0, 0);
}

/* Once the program exits: stop calling the driver when the launched work has drained, or after LEAVE_TIME.
 */
static void leave_driver(struct hook_thread *thread, uint64_t now) {
    if (!atomic_load(&thread->leaves) || atomic_load(&thread->left))
        return;
    if (thread->leave_by == 0) {
        thread->leave_by = now + LEAVE_TIME;
        token_give_back(thread->token);
    }
    if (token_drains(thread->token) && now < thread->leave_by)
        return;
    thread->token->without_driver = true;
    gate_exit(thread->gate);
    atomic_store(&thread->left, 1);
    sys_wake_all(&thread->left);
}

/* Main function of the hook thread. Each iteration: 1. connect or disconnect; 2. run the due steps of the token and of
 * the memory; 3. sleep until the next step is due, and handle arriving frames. */
static void *run(void *argument) {
    struct hook_thread *thread = argument;
    struct session *session = thread->session;
    sys_call(SYS_prctl, PR_SET_NAME, (long)"sharepod", 0, 0, 0, 0);
    sys_call(SYS_prctl, PR_SET_TIMERSLACK, 1000, 0, 0, 0, 0);
    run_anywhere();
    run_promptly();
    for (;;) {
        uint64_t now = sys_now();
        leave_driver(thread, now);
        session->hello_flags = thread->gate->no_membarrier ? SHP_HELLO_NO_MEMBARRIER : 0;
        session_step(session, now);
        uint64_t due = token_step(thread->token, now), sample = token_sample(thread->token, now);
        token_beat(thread->token, now);
        bool driver = !atomic_load(&thread->left);
        uint64_t freed = driver ? freed_step(thread->freed, thread->token->streams, now) : SYS_NEVER;
        uint64_t others[] = {sample, session_deadline(session), memory_step(now, driver), freed};
        for (unsigned i = 0; i < sizeof others / sizeof *others; i++)
            due = others[i] < due ? others[i] : due;
        session_wait(session, due);
    }
    return NULL;
}

/* At least as large as pthread_attr_t of any C library. */
union attributes {
    char bytes[256];
    uint64_t aligned;
};

/* Return attributes with a stack of at least 1 MiB: the program may have lowered the default for its many threads, and
 * the hook thread calls the driver. NULL: the default is large enough. */
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

/* All signals are blocked in the thread, except two that the C library sends to every thread. For example, setuid waits
 * until all threads have handled one of them. */
bool hook_thread_start(struct hook_thread *hook_thread) {
    int (*create)(unsigned long *, const void *, void *(*)(void *), void *) =
        (int (*)(unsigned long *, const void *, void *(*)(void *), void *))object_libc_symbol("pthread_create");
    int (*detach)(unsigned long) = (int (*)(unsigned long))object_libc_symbol("pthread_detach");
    uint64_t all = ~(3ull << 31), before = 0; /* all signals except 32 and 33 */
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

void hook_thread_leave_driver(struct hook_thread *hook_thread) {
    uint64_t until = sys_now() + SYS_SECOND;
    atomic_store(&hook_thread->leaves, true);
    session_wake();
    for (uint64_t now = sys_now(); !atomic_load(&hook_thread->left) && now < until; now = sys_now())
        sys_wait(&hook_thread->left, 0, until - now);
}
