/* Number of instructions of a launch, counted by single steps: launchsteps LAUNCHES.
 *
 * A child process launches directly to the driver, then through the preloaded hook. The parent single-steps it. Prints
 * a line `WAY N` for each way, with the mean over the launches. For the hollow driver, like launchcost.
 */
#include <cuda.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WARM = 2000, SEGMENTS = 3 };

typedef CUresult (*launch_call)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                CUstream, void **, void **);

static void launch_all(launch_call launch, long count) {
    for (long i = 0; i < count; i++)
        if (launch(NULL, 1, 1, 1, 1, 1, 1, 0, (CUstream)(uintptr_t)0x10000, NULL, NULL) != CUDA_SUCCESS)
            _exit(1);
}

/* Launch in three segments, with a stop before each and after the last: no launches, direct launches, launches through
 * the hook. */
static int live(long launches) {
    void *hollow = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    launch_call bare = NULL;
    if (hollow != NULL)
        *(void **)&bare = dlsym(hollow, "hollow_launch");
    if (bare == NULL || cuInit(0) != CUDA_SUCCESS || ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0)
        return 1;
    launch_all(cuLaunchKernel, WARM);
    for (int segment = 0; segment < SEGMENTS; segment++) {
        raise(SIGSTOP);
        launch_all(segment == 1 ? bare : cuLaunchKernel, segment == 0 ? 0 : launches);
    }
    raise(SIGSTOP);
    return 0;
}

/* Single-step the child to its next stop. Return the number of steps; -1: it has ended. */
static long steps_to_stop(pid_t child) {
    long steps = 0;
    for (int status; ptrace(PTRACE_SINGLESTEP, child, NULL, NULL) == 0; steps++) {
        if (waitpid(child, &status, 0) != child || !WIFSTOPPED(status))
            break;
        if (WSTOPSIG(status) == SIGSTOP)
            return steps;
    }
    return -1;
}

int main(int argc, char **argv) {
    long launches = argc == 2 ? atol(argv[1]) : 0, steps[SEGMENTS];
    int status;
    if (launches < 1) {
        fprintf(stderr, "launchsteps LAUNCHES, with the hollow driver\n");
        return 2;
    }
    pid_t child = fork();
    if (child == 0)
        _exit(live(launches));
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFSTOPPED(status))
        return 1;
    for (int segment = 0; segment < SEGMENTS; segment++)
        if ((steps[segment] = steps_to_stop(child)) < 0)
            return 1;
    ptrace(PTRACE_CONT, child, NULL, NULL);
    printf("bare %.1f\n", (double)(steps[1] - steps[0]) / (double)launches);
    printf("hooked %.1f\n", (double)(steps[2] - steps[0]) / (double)launches);
    return 0;
}
