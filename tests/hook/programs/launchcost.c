/* Cost of a call to the thread that makes it: launchcost THREADS CALLS ROUNDS launch|copy|copy-unsaid stream|default.
 *
 * In each round all threads make the call in several ways, one way after the other: straight to the driver, through
 * what is preloaded, and, of launches, straight with a mutex or a shared counter around. Prints a line `WAY NS ADDED`
 * for each: the medians over the rounds of the processor time per call, of all threads together, and of what it is
 * above that of the straight call in the same round. Made for a libcuda that does nothing (tests/doubles/hollow): it
 * exports its functions under names of its own too, which nobody gates.
 */
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_THREADS = 64, MOST_ROUNDS = 200, SHORT = 16 };
enum way { BARE, HOOKED, COUNTER, MUTEX, WAYS };

static const char *const names[WAYS] = {"bare", "hooked", "counter", "mutex"};

static CUresult (*launch_bare)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                               CUstream, void **, void **);
static CUresult (*copy_bare)(CUdeviceptr, CUdeviceptr, size_t, CUstream);
static CUresult (*copy_hooked)(CUdeviceptr, CUdeviceptr, size_t, CUstream);

static long calls;
static int rounds, threads;
static enum way ways;
static CUstream stream;
static pthread_barrier_t barrier;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static _Atomic uint64_t counter __attribute__((aligned(128)));
static double took[MOST_THREADS][MOST_ROUNDS][WAYS];

static double now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static void check(CUresult result) {
    if (result != CUDA_SUCCESS)
        exit(1);
}

static void launch(enum way way, long count) {
    switch (way) {
    case BARE:
        for (long i = 0; i < count; i++)
            check(launch_bare(NULL, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
        break;
    case HOOKED:
        for (long i = 0; i < count; i++)
            check(cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
        break;
    case COUNTER:
        for (long i = 0; i < count; i++) {
            atomic_fetch_add(&counter, 1);
            check(launch_bare(NULL, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
        }
        break;
    default:
        for (long i = 0; i < count; i++) {
            pthread_mutex_lock(&mutex);
            CUresult result = launch_bare(NULL, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
            pthread_mutex_unlock(&mutex);
            check(result);
        }
    }
}

static void copy(enum way way, long count) {
    CUresult (*call)(CUdeviceptr, CUdeviceptr, size_t, CUstream) = way == BARE ? copy_bare : copy_hooked;
    for (long i = 0; i < count; i++)
        check(call(0x1000, 0x2000, 64, stream));
}

static void *work(void *argument) {
    double (*mine)[WAYS] = argument;
    for (int round = -1; round < rounds; round++) /* the one before the first warms up */
        for (enum way step = BARE; step < ways; step++) {
            enum way way = (step + (enum way)(round + 1)) % ways;
            long count = way == COUNTER || way == MUTEX ? calls / SHORT : calls;
            pthread_barrier_wait(&barrier);
            double start = now_ns();
            copy_bare != NULL ? copy(way, count) : launch(way, count);
            if (round >= 0)
                mine[round][way] = (now_ns() - start) / (double)count;
        }
    return NULL;
}

static int ascending(const void *a, const void *b) {
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

static double median(double *values) {
    qsort(values, (size_t)rounds, sizeof *values, ascending);
    return rounds % 2 ? values[rounds / 2] : (values[rounds / 2 - 1] + values[rounds / 2]) / 2;
}

static void print(enum way way) {
    double whole[MOST_ROUNDS], added[MOST_ROUNDS];
    for (int round = 0; round < rounds; round++) {
        double sum = 0, bare = 0;
        for (int thread = 0; thread < threads; thread++) {
            sum += took[thread][round][way];
            bare += took[thread][round][BARE];
        }
        whole[round] = sum / threads;
        added[round] = (sum - bare) / threads;
    }
    printf("%s %.3f %.3f\n", names[way], median(whole), median(added));
}

/* By its symbol, as a program links it, and by the name that only the hollow driver has. */
static int choose(const char *call) {
    void *hollow = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (hollow == NULL)
        return 0;
    ways = WAYS;
    *(void **)&launch_bare = dlsym(hollow, "hollow_launch");
    if (strcmp(call, "launch") == 0)
        return launch_bare != NULL;
    ways = COUNTER;
    *(void **)&copy_bare = dlsym(hollow, "hollow_copy");
    copy_hooked = strcmp(call, "copy") == 0 ? cuMemcpyDtoDAsync_v2 : cuMemcpyAsync;
    return copy_bare != NULL && strncmp(call, "copy", 4) == 0;
}

int main(int argc, char **argv) {
    if (argc == 6) {
        threads = atoi(argv[1]);
        calls = atol(argv[2]);
        rounds = atoi(argv[3]);
    }
    if (threads < 1 || threads > MOST_THREADS || calls < SHORT || rounds < 1 || rounds > MOST_ROUNDS ||
        (strcmp(argv[5], "default") && strcmp(argv[5], "stream")) || !choose(argv[4])) {
        fprintf(stderr,
                "launchcost THREADS CALLS ROUNDS launch|copy|copy-unsaid stream|default, with the hollow driver\n");
        return 2;
    }
    stream = strcmp(argv[5], "stream") == 0 ? (CUstream)(uintptr_t)0x10000 : NULL;
    if (cuInit(0) != CUDA_SUCCESS)
        return 1;
    pthread_t workers[MOST_THREADS];
    pthread_barrier_init(&barrier, NULL, (unsigned)threads);
    for (int i = 0; i < threads; i++)
        if (pthread_create(&workers[i], NULL, work, took[i]) != 0)
            return 1;
    for (int i = 0; i < threads; i++)
        pthread_join(workers[i], NULL);
    for (enum way way = BARE; way < ways; way++)
        print(way);
    return 0;
}
