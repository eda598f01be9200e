/* How long a launch takes the launching thread: launchcost THREADS LAUNCHES default|stream. Prints nanoseconds of
 * processor time per launch, the least of several rounds. Made for a libcuda that does nothing (tests/hook/hollow).
 */
#include <cuda.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ROUNDS = 15, MOST_THREADS = 64 };

static long launches;
static CUstream stream;
static pthread_barrier_t barrier;

static double now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static void *work(void *result) {
    double best = 1e300;
    for (int round = 0; round < ROUNDS; round++) {
        pthread_barrier_wait(&barrier);
        double start = now_ns();
        for (long i = 0; i < launches; i++)
            if (cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL) != CUDA_SUCCESS)
                exit(1);
        double took = (now_ns() - start) / (double)launches;
        best = took < best ? took : best;
    }
    *(double *)result = best;
    return NULL;
}

int main(int argc, char **argv) {
    int threads = argc == 4 ? atoi(argv[1]) : 0;
    launches = argc == 4 ? atol(argv[2]) : 0;
    if (threads < 1 || threads > MOST_THREADS || launches < 1 ||
        (strcmp(argv[3], "default") && strcmp(argv[3], "stream"))) {
        fprintf(stderr, "launchcost THREADS LAUNCHES default|stream\n");
        return 2;
    }
    stream = strcmp(argv[3], "stream") == 0 ? (CUstream)(uintptr_t)0x10000 : NULL;
    if (cuInit(0) != CUDA_SUCCESS)
        return 1;
    pthread_t workers[MOST_THREADS];
    double results[MOST_THREADS], sum = 0;
    pthread_barrier_init(&barrier, NULL, (unsigned)threads);
    for (int i = 0; i < threads; i++)
        if (pthread_create(&workers[i], NULL, work, &results[i]) != 0)
            return 1;
    for (int i = 0; i < threads; i++) {
        pthread_join(workers[i], NULL);
        sum += results[i];
    }
    printf("%.3f\n", sum / threads);
    return 0;
}
