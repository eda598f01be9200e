/* Start of the hook in a process, at the first CUDA call, and again in a child of fork.
 *
 * Lower packages do not include higher packages. connect_rooms passes each package the state and the callbacks of
 * others that it needs.
 */
#include "process/process.h"

#include <string.h>

#include "base/elf.h"
#include "driver/entries.h"
#include "driver/own_calls.h"
#include "memory/credits.h"
#include "memory/exports.h"
#include "memory/refresh.h"
#include "session/frames.h"
#include "tenant/limits.h"
#include "time/gate/passage.h"

struct process *_Atomic the_process;

static _Atomic bool fork_watched,
    exit_watched; /* children of fork inherit these flags, as they inherit the registered handlers */

/* Runs in the child of fork: closes inherited descriptors, and zeroes struct process if Linux has not done so (H2). */
static void in_child(void) {
    struct process *process = the_process;
    session_after_fork();
    exports_after_fork();
    own_calls_after_fork();
    passage_after_fork();
    if (process == NULL)
        return;
    if (process->unwiped)
        memset(process, 0, sizeof *process);
    process->unwiped = true;
}

/* Register in_child, to run in children of fork. */
static void watch_fork(void) {
    int (*register_atfork)(void (*)(void), void (*)(void), void (*)(void), void *) =
        (int (*)(void (*)(void), void (*)(void), void (*)(void), void *))object_libc_symbol("__register_atfork");
    if (register_atfork != NULL && !atomic_exchange(&fork_watched, true))
        register_atfork(NULL, NULL, in_child, NULL);
}

/* Runs when the program ends by exit or by returning from main, before the handlers that were registered up to the
 * first cuInit. */
static void at_exit(void *unused) {
    struct process *process = the_process;
    (void)unused;
    if (process != NULL && atomic_load(&process->gate.word) != 0) /* 0 in a child of fork that never called CUDA */
        hook_thread_leave_driver(&process->thread);
}

void process_watch_exit(void) {
    int (*register_atexit)(void (*)(void *), void *, void *) =
        (int (*)(void (*)(void *), void *, void *))object_libc_symbol("__cxa_atexit");
    if (register_atexit != NULL && !atomic_exchange(&exit_watched, true))
        register_atexit(at_exit, NULL, NULL);
}

/* Callback of memory/: give the agent the charges of memory that is free by now on the GPU at `place`. Return true if
 * there was such memory. `wait`: wait for frees that streams have not reached. Makes no driver call while the program
 * exits. */
static bool refresh(int place, bool wait) {
    struct process *process = the_process;
    bool driver = !atomic_load(&process->thread.left);
    bool (*look)(struct freed_memory *, struct streams *) = wait ? freed_await : freed_refresh;
    bool less = memory_refresh(place, driver);
    return (driver && look(&process->freed, &process->streams)) || less;
}

/* Wait for the file `limits`, and read it. Return false if it does not appear: all CUDA calls then fail. If the agent's
 * setting fail_open is on, return true instead, with no GPU in `limits`: the program then runs without limits. */
static bool wait_for_limits(struct process *process, struct limits *limits) {
    uint64_t deadline = sys_now() + SHAREPOD_START_WAIT_MS * SYS_MS;
    while (!limits_read(process->directory, limits)) {
        if (process->waited || sys_now() >= deadline) {
            bool open = limits_fail_open(process->directory), logged = process->waited;
            process->waited = true;
            memset(limits, 0, sizeof *limits);
            if (!logged)
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

/* Find the vDSO's clock, which needs no system call. Done only once, also for children of fork (H6). */
static void find_clock(void) {
    static _Atomic bool looked;
    struct object kernel;
    if (atomic_exchange(&looked, true))
        return;
#if defined(__x86_64__)
    const char *name = "__vdso_clock_gettime";
#else
    const char *name = "__kernel_clock_gettime";
#endif
    if (object_find("linux-vdso.so", &kernel))
        sys_clock = (int (*)(int, struct timespec *))object_symbol(&kernel, name);
}

/* Pass each package the state and the callbacks of others that it needs, and register the handlers of frames. */
static void connect_rooms(struct process *process, uint64_t phase) {
    struct token *token = &process->token;
    token->gate = &process->gate;
    token->streams = &process->streams;
    token->session = &process->session;
    token->gpus = &process->gpus;
    token->directory = process->directory;
    token->phase = phase;
    frames_register(&process->session);
    token_register(token);
    credits_prepare(&process->memory, &process->gpus, &process->session, refresh);
    process->thread = (struct hook_thread){
        .gate = &process->gate, .session = &process->session, .token = token, .freed = &process->freed};
}

/* Set up the process. The caller holds the start lock. The steps, in this order:
 * 1. Find the clock, and check that the driver has all functions that the hook needs.
 * 2. Read the tenant's shares from the file `limits`.
 * 3. Set up the fork handler, the session's pipe, the gate, and the connections between packages.
 * 4. Start the hook thread.
 * 5. Set the gate word. Threads wait at the gate from then on, and not before. */
static CUresult start(struct process *process) {
    struct limits limits;
    /* 1. */
    find_clock();
    if (!HAS(cuCtxGetCurrent) || !HAS(cuCtxPushCurrent_v2) || !HAS(cuCtxPopCurrent_v2) || !HAS(cuEventCreate) ||
        !HAS(cuEventRecord) || !HAS(cuEventQuery) || !HAS(cuEventDestroy_v2)) {
        sys_say("this libcuda lacks functions that the hook needs; a driver of CUDA 11 or later has them", NULL);
        return CUDA_ERROR_SYSTEM_NOT_READY;
    }
    /* 2. */
    if (!object_own_directory(process->directory, sizeof process->directory) || !wait_for_limits(process, &limits))
        return CUDA_ERROR_SYSTEM_NOT_READY;
    gpus_learn(&process->gpus, limits.gpus, limits.count, false);
    atomic_store(&process->gpus.ungated, limits.count == 0);
    /* 3. */
    watch_fork();
    if (!session_prepare(&process->session, &process->gpus, process->directory)) {
        sys_say("cannot open a pipe, or map a page: too many open files in this process, or no memory", NULL);
        return CUDA_ERROR_SYSTEM_NOT_READY;
    }
    const struct shp_hints *hints = process->session.hints;
    gate_prepare(&process->gate, passage_slots_seen(), &hints->barred, &hints->co_runs);
    connect_rooms(process, limits.phase);
    /* 4. */
    if (!hook_thread_start(&process->thread)) {
        session_after_fork();
        sys_say("cannot start a thread: too many in this container, or no memory for its stack", NULL);
        return CUDA_ERROR_SYSTEM_NOT_READY;
    }
    /* 5. */
    atomic_fetch_or(&process->gate.word, GATE_READY);
    return CUDA_SUCCESS;
}

/* Return the memory of struct process, which the first thread maps; NULL: host memory is exhausted. */
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
    if (!entries_load())
        return CUDA_ERROR_NOT_FOUND;
    int devices;
    CUresult result = HAS(cuDeviceGetCount) ? DRIVER(cuDeviceGetCount)(&devices) : CUDA_SUCCESS;
    if (result != CUDA_SUCCESS) /* the driver is not initialized, or reports no device (H4) */
        return result;
    entries_settle(); /* takes the loader's lock, so not with start_lock: constructors that call CUDA hold the loader's
                         lock already (H6) */
    lock(&process->start_lock);
    if (atomic_load(&process->gate.word) == 0)
        result = start(process);
    unlock(&process->start_lock);
    return result;
}
