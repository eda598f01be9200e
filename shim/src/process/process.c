/* See process.h. */
#include "process/process.h"

#include <string.h>
#include <sys/prctl.h>

#include "memory/credits.h"
#include "driver/entries.h"
#include "process/limits.h"
#include "base/elf.h"

struct process *_Atomic the_process;

static _Atomic bool fork_watched; /* inherited by children, as the registration is */

/* In the child of fork. Where the kernel does not wipe on fork, this does. */
static void in_child(void) {
    struct process *process = the_process;
    session_after_fork();
    gate_after_fork();
    if (process == NULL)
        return;
    if (process->unwiped)
        memset(process, 0, sizeof *process);
    process->unwiped = true;
}

static void watch_fork(void) {
    int (*register_atfork)(void (*)(void), void (*)(void), void (*)(void), void *) =
        (int (*)(void (*)(void), void (*)(void), void (*)(void), void *))object_libc_symbol("__register_atfork");
    if (register_atfork != NULL && !atomic_exchange(&fork_watched, true))
        register_atfork(NULL, NULL, in_child, NULL);
}

static void *agent(void *argument) {
    struct process *process = argument;
    sys_call(SYS_prctl, PR_SET_NAME, (long)"sharepod", 0, 0, 0, 0);
    sys_call(SYS_prctl, PR_SET_TIMERSLACK, 1000, 0, 0, 0, 0);
    for (;;) {
        uint64_t now = sys_now();
        session_step(&process->session, now);
        uint64_t due = token_step(&process->token, now);
        uint64_t others[] = {session_deadline(&process->session), credits_step(now)};
        for (unsigned i = 0; i < sizeof others / sizeof *others; i++)
            due = others[i] < due ? others[i] : due;
        session_wait(&process->session, due);
    }
    return NULL;
}

/* Of the C library: larger than any of theirs. */
union attributes {
    char bytes[256];
    uint64_t aligned;
};

/* A program may have made the default stack small for the many threads of its own; this one calls the driver. NULL: the
 * default will do. */
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

/* The program's signals are for its own threads. The two that the C library sends to every thread stay open: setuid
 * waits until all have answered. */
static bool start_agent(struct process *process) {
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
    bool created = create(&thread, chosen, agent, process) == 0;
    sys_call(SYS_rt_sigprocmask, 2, (long)&before, 0, sizeof all, 0, 0);
    if (created && detach != NULL)
        detach(thread);
    return created;
}

/* Without the file, but with the agent's leave to go on: true, and no GPU is named. */
static bool wait_for_limits(struct process *process, struct limits *limits) {
    uint64_t deadline = sys_now() + SHAREPOD_START_WAIT_MS * SYS_MS;
    while (!limits_read(process->directory, limits)) {
        if (process->waited || sys_now() >= deadline) {
            bool open = limits_fail_open(process->directory), told = process->waited;
            process->waited = true;
            memset(limits, 0, sizeof *limits);
            if (!told)
                sys_say("no readable file ", process->directory, "limits: ",
                        open ? "going on without share and limit, as the agent's setting fail_open says"
                             : "this GPU is shared, and without it no program may use it",
                        NULL);
            return open;
        }
        sys_sleep(50 * SYS_MS);
    }
    return true;
}

static void find_clock(void) {
    struct object kernel;
#if defined(__x86_64__)
    const char *name = "__vdso_clock_gettime";
#else
    const char *name = "__kernel_clock_gettime";
#endif
    if (object_find("linux-vdso.so", &kernel))
        sys_clock = (int (*)(int, struct timespec *))object_symbol(&kernel, name);
}

static CUresult start(struct process *process) {
    struct limits limits;
    find_clock();
    if (!entries_load())
        return CUDA_ERROR_NOT_FOUND;
    if (!HAS(cuCtxGetCurrent) || !HAS(cuCtxPushCurrent_v2) || !HAS(cuCtxPopCurrent_v2) || !HAS(cuEventCreate) ||
        !HAS(cuEventRecord) || !HAS(cuEventQuery) || !HAS(cuEventDestroy_v2)) {
        sys_say("this libcuda lacks functions that the hook needs; a driver of CUDA 11 or later has them", NULL);
        return CUDA_ERROR_SYSTEM_NOT_READY;
    }
    if (!object_own_directory(process->directory, sizeof process->directory) || !wait_for_limits(process, &limits))
        return CUDA_ERROR_SYSTEM_NOT_READY;
    gpus_learn(&process->gpus, limits.gpus, limits.count, false);
    atomic_store(&process->gpus.ungated, limits.count == 0);
    process->token.phase = limits.phase;
    watch_fork();
    if (!session_prepare(&process->session)) {
        sys_say("cannot open a pipe: too many open files in this process", NULL);
        return CUDA_ERROR_SYSTEM_NOT_READY;
    }
    gate_prepare(&process->gate);
    if (!start_agent(process)) {
        session_after_fork();
        sys_say("cannot start a thread: too many in this container, or no memory for its stack", NULL);
        return CUDA_ERROR_SYSTEM_NOT_READY;
    }
    atomic_fetch_or(&process->gate.word, GATE_READY); /* from now on, and not before, threads wait at the gate */
    return CUDA_SUCCESS;
}

static struct process *map_process(void) {
    struct process *fresh = sys_map(sizeof *fresh), *first = NULL;
    if (fresh == NULL)
        return atomic_load(&the_process);
    fresh->unwiped = true;
    if (atomic_compare_exchange_strong(&the_process, &first, fresh))
        return fresh;
    sys_unmap(fresh, sizeof *fresh);
    return first;
}

CUresult process_enter(void) {
    struct process *process = atomic_load(&the_process);
    if (process != NULL && atomic_load_explicit(&process->gate.word, memory_order_acquire) != 0)
        return CUDA_SUCCESS;
    if (process == NULL && (process = map_process()) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = CUDA_SUCCESS;
    lock(&process->start_lock);
    if (atomic_load(&process->gate.word) == 0)
        result = start(process);
    unlock(&process->start_lock);
    return result;
}

EXPORT CUresult cuInit(unsigned int flags) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS)
        return result;
    return HAS(cuInit) ? DRIVER(cuInit)(flags) : CUDA_ERROR_NOT_FOUND;
}
