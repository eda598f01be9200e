/* NOCUDA: lives of a program under the hook: `lifecycle CASE` runs the function with that name, prints lines about its
 * progress, and exits with 0 if all calls returned as they should.
 *
 * The program opens libcuda itself, so that it can close it again. Each step that the test must see is a line on
 * standard output. Each step that the test must confirm is a line on standard input.
 */
#include <cuda.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

static void *libcuda;
static CUcontext context;
static CUfunction function;
static __typeof__(&cuLaunchKernel) launch_kernel;
static const char *self;

static void print_line(const char *format, ...) {
    char text[256];
    va_list parts;
    va_start(parts, format);
    int length = vsnprintf(text, sizeof text - 1, format, parts);
    va_end(parts);
    text[length++] = '\n';
    if (write(1, text, (size_t)length) != length)
        _exit(3);
}

static void hear(void) {
    char byte;
    while (read(0, &byte, 1) == 1 && byte != '\n')
        ;
}

static void check(const char *what, long result) {
    if (result == 0)
        return;
    print_line("error %s %ld", what, result);
    _exit(1);
}

#define CUDA(symbol) ((__typeof__(&symbol))dlsym(libcuda, #symbol))
#define CHECK(symbol, ...) check(#symbol, CUDA(symbol)(__VA_ARGS__))

static void open_driver(void) {
    libcuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (libcuda == NULL)
        check(dlerror(), 1);
    launch_kernel = CUDA(cuLaunchKernel);
}

static void start(void) {
    CUmodule module;
    open_driver();
    CHECK(cuInit, 0);
    CHECK(cuDevicePrimaryCtxRetain, &context, 0);
    CHECK(cuCtxSetCurrent, context);
    CHECK(cuModuleLoadData, &module, "");
    CHECK(cuModuleGetFunction, &function, module, "spin_us_200");
}

static CUresult launch(void) {
    return launch_kernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
}

static void pause_ms(long ms) {
    struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    while (nanosleep(&time, &time) != 0)
        ;
}

static void *launching(void *unused) {
    (void)unused;
    CHECK(cuCtxSetCurrent, context);
    check("launch", launch());
    return NULL;
}

static pthread_t start_thread(void *(*work)(void *), void *argument) {
    pthread_t thread;
    check("pthread_create", pthread_create(&thread, NULL, work, argument));
    return thread;
}

static int finish(pid_t child) {
    int status = -1;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR)
        ;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* ---- the cases */

static void run(void) {
    start();
    for (int i = 0; i < 5; i++)
        check("launch", launch());
    CHECK(cuCtxSynchronize);
    print_line("ran");
}

static void exec_holding(void) {
    CUdeviceptr memory;
    start();
    CHECK(cuMemAlloc_v2, &memory, 100 << 20);
    check("launch", launch());
    print_line("replaced");
    execl(self, self, "hold", NULL);
    check("execl", errno);
}

/* Allocate 200 MiB, most of the tenant's memory, and keep them. */
static void hold(void) {
    CUdeviceptr memory;
    start();
    check("alloc", CUDA(cuMemAlloc_v2)(&memory, 200 << 20));
    check("launch", launch());
    print_line("held");
    hear();
}

static void spawning(void) {
    char *arguments[] = {(char *)self, "run", NULL};
    start();
    check("launch", launch());
    for (int i = 0; i < 3; i++) {
        pid_t child;
        check("posix_spawn", posix_spawn(&child, self, NULL, NULL, arguments, environ));
        check("spawned", finish(child));
        child = vfork();
        if (child == 0) {
            execv(self, arguments);
            _exit(4);
        }
        check("forked", finish(child));
        check("launch", launch());
    }
    check("system", system("true"));
    check("launch", launch());
    print_line("done");
}

static void end_waiting(const char *how) {
    start();
    start_thread(launching, NULL);
    hear(); /* the test has seen that the launch waits */
    if (strcmp(how, "exit") == 0)
        exit(7);
    if (strcmp(how, "_exit") == 0)
        _exit(7);
    if (strcmp(how, "quick_exit") == 0)
        quick_exit(7);
    if (strcmp(how, "abort") == 0)
        abort();
}

static void at_exit(void) {
    check("launch at exit", launch());
    check("synchronize at exit", CUDA(cuCtxSynchronize)());
    print_line("launched at exit");
}

/* An exit handler runs after main has returned, and must wait for the token. */
static void exit_handler(void) {
    start();
    atexit(at_exit);
    check("launch", launch());
    CHECK(cuCtxSynchronize);
    hear(); /* the test has seen that the token was returned */
}

/* A handler that was registered before the first call runs after the hook has left the driver. */
static void late_at_exit(void) {
    for (int i = 0; i < 200; i++)
        check("launch", launch());
    print_line("done");
}

static void late_exit_handler(void) {
    atexit(late_at_exit);
    start();
    check("launch", launch());
}

static void *cancelled(void *unused) {
    (void)unused;
    pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, NULL);
    CHECK(cuCtxSetCurrent, context);
    launch();
    return NULL;
}

static void cancel_waiting(void) {
    start();
    pthread_t thread = start_thread(cancelled, NULL);
    hear();
    check("pthread_cancel", pthread_cancel(thread));
    check("pthread_join", pthread_join(thread, NULL));
    print_line("cancelled");
    hear();
    check("launch", launch());
    print_line("launched");
    hear();
}

static _Atomic long launched;
static _Atomic bool waits;

static void go(int number) {
    (void)number;
    syscall(SYS_exit, 0); /* ends only this thread, like a thread that is cancelled at any point */
}

/* Fill the driver's queue. The launch that finds it full waits inside the driver. */
static void *launching_on(void *unused) {
    (void)unused;
    CHECK(cuCtxSetCurrent, context);
    for (;; atomic_fetch_add(&launched, 1))
        check("launch", launch());
    return NULL;
}

static void *waiting(void *unused) {
    launching(unused);
    atomic_store(&waits, true);
    for (;;)
        pause();
    return NULL;
}

static void handle(int number, void (*handler)(int), int flags);

/* Two threads keep the existing slots. A third thread, without a slot, ends in the middle of its launch. */
static void gone_inside(void) {
    CUmodule module;
    start();
    handle(SIGUSR1, go, 0);
    check("launch", launch());
    start_thread(waiting, NULL);
    while (!atomic_load(&waits))
        pause_ms(1);
    CHECK(cuModuleLoadData, &module, "");
    CHECK(cuModuleGetFunction, &function, module, "hang");
    pthread_t thread = start_thread(launching_on, NULL);
    for (long before = -1; before != atomic_load(&launched) || before < 500; pause_ms(100))
        before = atomic_load(&launched);
    pthread_kill(thread, SIGUSR1);
    print_line("exited");
    hear();
}

static sigjmp_buf before_wait;

static void jump(int signal) {
    (void)signal;
    siglongjmp(before_wait, 1);
}

static void handle(int number, void (*handler)(int), int flags) {
    struct sigaction action = {.sa_handler = handler, .sa_flags = flags};
    check("sigaction", sigaction(number, &action, NULL));
}

static void jump_away(void) {
    start();
    handle(SIGALRM, jump, 0);
    if (sigsetjmp(before_wait, 1) == 0) {
        alarm(1);
        launch();
        check("a launch that the gate was to keep", 1);
    }
    print_line("jumped");
    hear();
    check("launch", launch());
    print_line("launched");
    hear();
}

/* Leave more waits for memory by longjmp than the hook's session has entries for unanswered requests. */
static void jump_away_from_memory(void) {
    struct itimerval soon = {.it_value = {.tv_usec = 20000}};
    CUdeviceptr memory;
    start();
    handle(SIGALRM, jump, 0);
    for (volatile int i = 0; i < 80; i++)
        if (sigsetjmp(before_wait, 1) == 0) {
            setitimer(ITIMER_REAL, &soon, NULL);
            CUDA(cuMemAlloc_v2)(&memory, 1 << 20);
            check("an allocation that was to wait", 1);
        }
    print_line("jumped");
    hear();
    CHECK(cuMemAlloc_v2, &memory, 1 << 20);
    print_line("allocated");
}

static CUresult handled;

static void launch_in_handler(int signal) {
    (void)signal;
    handled = launch();
}

static void handler_calls_cuda(void) {
    start();
    handle(SIGALRM, launch_in_handler, SA_RESTART);
    alarm(1);
    check("launch", launch());
    check("launch of the handler", handled);
    print_line("launched");
    hear();
}

static _Atomic int interruptions;

static void count_interruption(int signal) {
    (void)signal;
    atomic_fetch_add(&interruptions, 1);
}

static void interrupted(void) {
    struct itimerval often = {.it_interval = {.tv_usec = 500}, .it_value = {.tv_usec = 500}};
    CUdeviceptr memory;
    start();
    handle(SIGALRM, count_interruption, 0);
    setitimer(ITIMER_REAL, &often, NULL);
    for (int i = 0; i < 300; i++) {
        check("launch", launch());
        CHECK(cuCtxSynchronize);
    }
    for (int i = 0; i < 30; i++) {
        CHECK(cuMemAlloc_v2, &memory, 40 << 20);
        CHECK(cuMemFree_v2, memory);
    }
    print_line("interrupted %d", interruptions);
}

/* Put a file of the program over each descriptor, as a program does that becomes a daemon. The hook must not write into
 * it under the numbers of its former descriptors. */
static void write_over(void) {
    char name[] = "/tmp/lifecycle-XXXXXX";
    start();
    check("launch", launch());
    hear();
    int file = mkstemp(name), closed = 0;
    unlink(name);
    for (int number = 3; number < 4096; number++)
        if (number != file && fcntl(number, F_GETFD) >= 0)
            closed += dup2(file, number) == number;
    print_line("over %d", closed);
    for (int i = 0; i < 50; i++) {
        check("launch", launch());
        pause_ms(10);
    }
    print_line("written %ld", (long)lseek(file, 0, SEEK_END));
    hear();
}

static void close_all(void) {
    enum { FILES = 1100 };
    char name[] = "/tmp/lifecycle-XXXXXX";
    struct rusage usage;
    struct rlimit files = {.rlim_cur = 4096, .rlim_max = 4096};
    setrlimit(RLIMIT_NOFILE, &files); /* before the hook chooses numbers for its descriptors */
    start();
    check("launch", launch());
    hear();
    check("close_range", syscall(SYS_close_range, 3, ~0u, 0));
    int file = mkstemp(name);
    unlink(name);
    for (int i = 0; i < FILES; i++)
        dup(file);
    print_line("closed");
    for (int i = 0; i < 50; i++) {
        check("launch", launch());
        pause_ms(10);
    }
    getrusage(RUSAGE_SELF, &usage);
    print_line("cpu_ms %ld", usage.ru_utime.tv_sec * 1000 + usage.ru_utime.tv_usec / 1000 +
                                 usage.ru_stime.tv_sec * 1000 + usage.ru_stime.tv_usec / 1000);
    print_line("written %ld", (long)lseek(file, 0, SEEK_END));
    hear();
}

static _Atomic int ready_to_start;

static void *start_late(void *result) {
    atomic_fetch_add(&ready_to_start, 1);
    while (atomic_load(&ready_to_start) < 3)
        pause_ms(1);
    *(CUresult *)result = CUDA(cuInit)(0);
    return NULL;
}

/* Let each start of a thread fail, as in a container with its maximum of threads. */
static void forbid_threads(void) {
#if defined(__x86_64__)
    enum { CLONE = 56, CLONE3 = 435 };
#else
    enum { CLONE = 220, CLONE3 = 435 };
#endif
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, CLONE, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, CLONE3, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAGAIN),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof rules / sizeof *rules, .filter = rules};
    check("prctl", prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    check("seccomp", syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program));
}

static void no_threads(void) {
    CUresult results[2] = {CUDA_SUCCESS, CUDA_SUCCESS};
    pthread_t threads[2];
    open_driver();
    for (int i = 0; i < 2; i++)
        threads[i] = start_thread(start_late, &results[i]);
    forbid_threads();
    atomic_fetch_add(&ready_to_start, 1);
    for (int i = 0; i < 2; i++)
        check("pthread_join", pthread_join(threads[i], NULL));
    print_line("results %d %d %d", results[0], results[1], CUDA(cuInit)(0));
}

static void *start_and_launch(void *unused) {
    (void)unused;
    start();
    check("launch", launch());
    CUdeviceptr memory;
    CHECK(cuMemAlloc_v2, &memory, 1 << 20);
    CHECK(cuMemFree_v2, memory);
    return NULL;
}

/* Use threads with the smallest possible stack, which is also the program's default. */
static void small_stacks(void) {
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    check("setstacksize", pthread_attr_setstacksize(&attributes, (size_t)sysconf(_SC_THREAD_STACK_MIN) + 8192));
    check("setattr_default", pthread_setattr_default_np(&attributes));
    check("pthread_create", pthread_create(&thread, &attributes, start_and_launch, NULL));
    check("pthread_join", pthread_join(thread, NULL));
    print_line("done");
}

static void close_library(void) {
    open_driver();
    check("dlclose", dlclose(libcuda)); /* the program has used libcuda and closes it */
    for (int i = 0; i < 3; i++) {
        start();
        check("launch", launch());
        check("dlclose", dlclose(libcuda));
        pause_ms(120); /* the hook returns the token during this pause */
    }
    print_line("done");
}

/* Use all descriptors, so that none is left for a socket when the agent comes back. */
static void no_descriptors(void) {
    struct rlimit files = {.rlim_cur = 200, .rlim_max = 200};
    static int filled[256];
    int count = 0;
    setrlimit(RLIMIT_NOFILE, &files);
    start();
    check("launch", launch());
    print_line("started");
    hear();
    while (count < 256 && (filled[count] = open("/dev/null", O_RDONLY)) >= 0)
        count++;
    print_line("full");
    hear();
    print_line("launching");
    start_thread(launching, NULL);
    hear();
    for (int i = 0; i < count; i++)
        close(filled[i]);
    print_line("empty");
    hear();
}

static void churn_threads(void) {
    start();
    for (int round = 0; round < 40; round++) {
        pthread_t threads[40];
        for (int i = 0; i < 40; i++)
            threads[i] = start_thread(launching, NULL);
        for (int i = 0; i < 40; i++)
            check("pthread_join", pthread_join(threads[i], NULL));
    }
    CHECK(cuCtxSynchronize);
    print_line("done");
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*live)(void);
    } lives[] = {
        {"run", run},
        {"exec_holding", exec_holding},
        {"hold", hold},
        {"spawning", spawning},
        {"exit_handler", exit_handler},
        {"late_exit_handler", late_exit_handler},
        {"cancel_waiting", cancel_waiting},
        {"jump_away", jump_away},
        {"jump_away_from_memory", jump_away_from_memory},
        {"handler_calls_cuda", handler_calls_cuda},
        {"interrupted", interrupted},
        {"close_all", close_all},
        {"no_threads", no_threads},
        {"small_stacks", small_stacks},
        {"close_library", close_library},
        {"no_descriptors", no_descriptors},
        {"churn_threads", churn_threads},
        {"gone_inside", gone_inside},
        {"write_over", write_over},
    };
    self = argv[0];
    if (argc == 3 && strcmp(argv[1], "end_waiting") == 0) {
        end_waiting(argv[2]);
        return 7;
    }
    for (size_t i = 0; argc == 2 && i < sizeof lives / sizeof *lives; i++)
        if (strcmp(lives[i].name, argv[1]) == 0) {
            lives[i].live();
            return 0;
        }
    fprintf(stderr, "lifecycle: no case %s\n", argc > 1 ? argv[1] : "");
    return 2;
}
