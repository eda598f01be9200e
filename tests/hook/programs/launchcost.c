/* Cost of a call to the calling thread: launchcost THREADS CALLS ROUNDS CALL STREAM.
 *
 * CALL: launch; graph; launch-cold (before each launch, other memory fills the caches); copy; copy-unsaid. STREAM:
 * default; stream; or a number of streams that each thread uses in turn. LAUNCHCOST_ALIVE: number of other threads that
 * have launched and stay alive. LAUNCHCOST_STREAMS: number of streams into which the first of them has launched.
 * LAUNCHCOST_GRAPHS: number of graphs that it has launched.
 *
 * In each round all threads make the call in several ways: directly to the driver; through the preloaded library; and,
 * for launches, directly with a mutex, a shared counter, or a counter per stream in its own cache line (`lines`), the
 * least memory that a gate must touch. Prints a line `WAY NS ADDED` for each way: median processor time per call, and
 * median difference to the direct call. Made for the hollow libcuda (tests/doubles/hollow), which also exports its
 * functions under names that the hook does not gate.
 */
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_THREADS = 64, MOST_ROUNDS = 200, SHORT = 16, MOST_STREAMS = 4096 };
/* COLD_SHARE: one cold call is made for so many requested calls. COLD_BYTES: memory that fills the caches before it. */
enum { COLD_SHARE = 1000, COLD_BYTES = 4 << 20, CACHE_LINE = 64 };
enum way { BARE, HOOKED, COUNTER, MUTEX, LINES, WAYS };

static const char *const names[WAYS] = {"bare", "hooked", "counter", "mutex", "lines"};

static CUresult (*launch_bare)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                               CUstream, void **, void **);
static CUresult (*copy_bare)(CUdeviceptr, CUdeviceptr, size_t, CUstream);
static CUresult (*copy_hooked)(CUdeviceptr, CUdeviceptr, size_t, CUstream);

static CUresult (*graph_bare)(CUgraphExec, CUstream);

static long calls;
static int rounds, threads;
static enum way ways;
static bool graphs, cold;
static unsigned in_turn = 1; /* streams of each thread */
static __thread CUstream *streams;
struct line {
    _Atomic uint64_t count __attribute__((aligned(CACHE_LINE)));
};
static __thread struct line *lines; /* each stream's counter, in a cache line of its own */
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

static int ascending(const void *a, const void *b) {
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

static CUresult launch_one(bool hooked, CUstream stream) {
    if (graphs)
        return hooked ? cuGraphLaunch((CUgraphExec)(uintptr_t)0x20000, stream)
                      : graph_bare((CUgraphExec)(uintptr_t)0x20000, stream);
    return hooked ? cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL)
                  : launch_bare(NULL, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
}

static inline __attribute__((always_inline)) void launch_by(enum way way, CUstream stream) {
    if (way == COUNTER)
        atomic_fetch_add(&counter, 1);
    if (way == MUTEX)
        pthread_mutex_lock(&mutex);
    CUresult result = launch_one(way == HOOKED, stream);
    if (way == MUTEX)
        pthread_mutex_unlock(&mutex);
    check(result);
}

static inline __attribute__((always_inline)) void launch_all(enum way way, long count) {
    unsigned next = 0;
    for (long i = 0; i < count; i++) {
        if (way == LINES) {
            uint64_t count = atomic_load_explicit(&lines[next].count, memory_order_relaxed);
            atomic_store_explicit(&lines[next].count, count + 1, memory_order_relaxed);
        }
        launch_by(way, streams[next]);
        next = next + 1 == in_turn ? 0 : next + 1;
    }
}

static void launch(enum way way, long count) {
    switch (way) {
    case BARE: launch_all(BARE, count); break;
    case HOOKED: launch_all(HOOKED, count); break;
    case COUNTER: launch_all(COUNTER, count); break;
    case LINES: launch_all(LINES, count); break;
    default: launch_all(MUTEX, count);
    }
}

static double ticks_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

/* Return the median ns of a launch after other memory has filled the caches. All ways include the time of reading the
 * clock, so their differences do not. */
static double launch_cold(enum way way, long count) {
    static char other[MOST_THREADS][COLD_BYTES];
    double samples[COLD_SHARE];
    static _Atomic unsigned places;
    static __thread unsigned place = MOST_THREADS;
    if (place == MOST_THREADS)
        place = atomic_fetch_add(&places, 1);
    long taken = count / COLD_SHARE > COLD_SHARE ? COLD_SHARE : count / COLD_SHARE + 1;
    for (long i = 0; i < taken; i++) {
        for (size_t at = 0; at < COLD_BYTES; at += CACHE_LINE)
            other[place][at]++;
        double start = ticks_ns();
        launch(way, 1);
        samples[i] = ticks_ns() - start;
    }
    qsort(samples, (size_t)taken, sizeof *samples, ascending);
    return samples[taken / 2];
}

static void copy(enum way way, long count) {
    CUresult (*call)(CUdeviceptr, CUdeviceptr, size_t, CUstream) = way == BARE ? copy_bare : copy_hooked;
    for (long i = 0; i < count; i++)
        check(call(0x1000, 0x2000, 64, streams[0]));
}

static bool default_stream;

/* Choose the thread's streams: `in_turn` streams of its own; or, if that is 1, one stream that all threads share. */
static void choose_streams(void) {
    streams = calloc(in_turn, sizeof *streams);
    lines = aligned_alloc(CACHE_LINE, in_turn * sizeof *lines);
    if (lines == NULL)
        exit(1);
    memset(lines, 0, in_turn * sizeof *lines);
    for (unsigned i = 0; i < in_turn && !default_stream; i++)
        if (in_turn == 1)
            streams[i] = (CUstream)(uintptr_t)0x10000;
        else
            check(cuStreamCreate(&streams[i], 0));
}

static void *work(void *argument) {
    double (*mine)[WAYS] = argument;
    choose_streams();
    for (int round = -1; round < rounds; round++) /* the round before the first is for warm-up */
        for (enum way step = BARE; step < ways; step++) {
            enum way way = (step + (enum way)(round + 1)) % ways;
            long count = way == COUNTER || way == MUTEX ? calls / SHORT : calls;
            pthread_barrier_wait(&barrier);
            double start = now_ns(), each = 0;
            if (cold)
                each = launch_cold(way, calls);
            else
                copy_bare != NULL ? copy(way, count) : launch(way, count);
            if (round >= 0)
                mine[round][way] = cold ? each : (now_ns() - start) / (double)count;
        }
    return NULL;
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

/* Look the call up twice: by its symbol, which leads to the hook, and by the hollow driver's other name for it, which
 * the hook does not gate. */
static int choose(const char *call) {
    void *hollow = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (hollow == NULL)
        return 0;
    ways = WAYS;
    *(void **)&launch_bare = dlsym(hollow, "hollow_launch");
    *(void **)&graph_bare = dlsym(hollow, "hollow_graph");
    graphs = strcmp(call, "graph") == 0;
    cold = strcmp(call, "launch-cold") == 0;
    if (strncmp(call, "launch", 6) == 0 || graphs)
        return launch_bare != NULL && graph_bare != NULL;
    ways = COUNTER;
    *(void **)&copy_bare = dlsym(hollow, "hollow_copy");
    copy_hooked = strcmp(call, "copy") == 0 ? cuMemcpyDtoDAsync_v2 : cuMemcpyAsync;
    return copy_bare != NULL && strncmp(call, "copy", 4) == 0;
}

static pthread_barrier_t alive;
static long known_streams, known_graphs;

/* Launch (the first thread: into `known_streams` streams and `known_graphs` graphs), then stay alive. */
static void *live(void *first) {
    CUstream made = (CUstream)(uintptr_t)0x10000;
    for (long i = 0; i < (first != NULL && known_streams > 0 ? known_streams : 1); i++) {
        if (i > 0)
            check(cuStreamCreate(&made, 0));
        check(cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, made, NULL, NULL));
    }
    for (long i = 0; i < (first != NULL ? known_graphs : 0); i++)
        check(cuGraphLaunch((CUgraphExec)(uintptr_t)(0x20000 + 0x100 * i), made)); /* the measured graph first */
    pthread_barrier_wait(&alive);
    pthread_barrier_wait(&alive); /* never passed: no other thread reaches this barrier */
    return NULL;
}

/* Start the threads that only stay alive. */
static void start_living(void) {
    const char *count = getenv("LAUNCHCOST_ALIVE"), *known = getenv("LAUNCHCOST_STREAMS"),
               *launched = getenv("LAUNCHCOST_GRAPHS");
    long living = count != NULL ? atol(count) : 0;
    known_streams = known != NULL ? atol(known) : 0;
    known_graphs = launched != NULL ? atol(launched) : 0;
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 64 << 10);
    if (living == 0)
        return;
    pthread_barrier_init(&alive, NULL, (unsigned)living + 1);
    for (long i = 0; i < living; i++) {
        pthread_t thread;
        if (pthread_create(&thread, &small, live, i == 0 ? &alive : NULL) != 0)
            exit(1);
    }
    pthread_barrier_wait(&alive);
}

int main(int argc, char **argv) {
    if (argc == 6) {
        threads = atoi(argv[1]);
        calls = atol(argv[2]);
        rounds = atoi(argv[3]);
    }
    if (argc == 6 && argv[5][0] >= '0' && argv[5][0] <= '9')
        in_turn = (unsigned)atoi(argv[5]);
    default_stream = argc == 6 && strcmp(argv[5], "default") == 0;
    if (threads < 1 || threads > MOST_THREADS || calls < SHORT || rounds < 1 || rounds > MOST_ROUNDS || in_turn < 1 ||
        in_turn > MOST_STREAMS || !choose(argv[4])) {
        fprintf(stderr, "launchcost THREADS CALLS ROUNDS CALL STREAM, with the hollow driver\n");
        return 2;
    }
    if (cuInit(0) != CUDA_SUCCESS)
        return 1;
    start_living();
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
