/* Programs whose streams wait for a later launch or action of the same thread. Each mode must end, as without the hook.
 *
 *     waits order KIND ROUNDS     a launch behind a wait, then the launch that ends the wait. KIND: value, event, mutex
 *     waits full KIND OPERATIONS STREAMS
 *                                 a wait and further operations in each stream, released by the host. KIND has some of
 *                                 the words value, function, graph, mixed, destroy
 *     waits shared KIND ROUNDS    a thread puts waits into a stream, two launch into it, and one ends the waits:
 *                                 KIND is value, event or function
 *     waits random SEED           threads with such waits, short and nearly full streams, and ends of streams
 */
#include <cuda.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { THREADS = 3, STREAMS = 4, KERNELS = 3, WORDS = 1 << 14, FULL = 1023 };

static CUcontext context;
static CUfunction kernels[KERNELS];
static CUgraphExec graph;
static CUdeviceptr memory;
static _Atomic uint32_t words[WORDS]; /* words for which streams wait */
static char page[4096];

static void check(const char *what, CUresult result) {
    if (result == CUDA_SUCCESS)
        return;
    fprintf(stderr, "%s: %d\n", what, (int)result);
    _exit(1);
}

#define CHECK(call) check(#call, call)

static void launch(CUfunction kernel, CUstream stream) {
    CHECK(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
}

static CUdeviceptr address(_Atomic uint32_t *word) {
    return (CUdeviceptr)(uintptr_t)word;
}

static void wait_value(CUstream stream, _Atomic uint32_t *word, uint32_t value) {
    CHECK(cuStreamWaitValue32_v2(stream, address(word), value, CU_STREAM_WAIT_VALUE_GEQ));
}

static void CUDA_CB await_word(void *word) {
    while (atomic_load((_Atomic uint32_t *)word) == 0)
        usleep(100);
}

static void CUDA_CB lock_once(void *mutex) {
    pthread_mutex_lock(mutex);
    pthread_mutex_unlock(mutex);
}

static CUstream make(unsigned flags) {
    CUstream stream;
    CHECK(cuStreamCreate(&stream, flags));
    return stream;
}

static CUevent make_event(void) {
    CUevent event;
    CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    return event;
}

static void begin(void) {
    static const char *const names[KERNELS] = {"spin_us_10", "spin_us_100", "spin_us_700"};
    CUmodule module;
    CUgraph captured;
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuModuleLoadData(&module, ""));
    for (int i = 0; i < KERNELS; i++)
        CHECK(cuModuleGetFunction(&kernels[i], module, names[i]));
    CHECK(cuMemAlloc_v2(&memory, sizeof page));
    CUstream stream = make(CU_STREAM_NON_BLOCKING);
    CHECK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    launch(kernels[0], stream);
    CHECK(cuStreamEndCapture(stream, &captured));
    CHECK(cuGraphInstantiateWithFlags(&graph, captured, 0));
}

static void order(const char *kind, uint32_t rounds) {
    CUstream first = make(CU_STREAM_NON_BLOCKING), other = make(CU_STREAM_NON_BLOCKING),
             third = make(CU_STREAM_NON_BLOCKING);
    CUevent event = make_event();
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    bool locks = strcmp(kind, "mutex") == 0, by_event = strcmp(kind, "event") == 0;
    for (uint32_t i = 1; i <= rounds; i++) {
        if (locks) {
            pthread_mutex_lock(&mutex);
            CHECK(cuLaunchHostFunc(first, lock_once, &mutex));
        } else {
            wait_value(by_event ? third : first, &words[0], i);
        }
        if (by_event) {
            CHECK(cuEventRecord(event, third));
            CHECK(cuStreamWaitEvent(first, event, 0));
        }
        launch(kernels[1], first);
        launch(kernels[1], other);
        if (locks)
            pthread_mutex_unlock(&mutex);
        else
            CHECK(cuStreamWriteValue32_v2(other, address(&words[0]), i, 0));
    }
    CHECK(cuStreamSynchronize(first));
    CHECK(cuStreamSynchronize(other));
}

/* Put one operation into the stream. */
static void operate(CUstream stream, CUevent event, CUfunction kernel, unsigned kind) {
    switch (kind) {
    case 0: CHECK(cuMemcpyHtoDAsync_v2(memory, page, 64, stream)); break;
    case 1: CHECK(cuEventRecord(event, stream)); break;
    case 2: CHECK(cuGraphLaunch(graph, stream)); break;
    default: launch(kernel, stream); break;
    }
}

static void full(const char *kind, int operations, int count) {
    CUstream streams[STREAMS], other = make(CU_STREAM_NON_BLOCKING);
    CUevent event = make_event();
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < count; i++)
            streams[i] = make(CU_STREAM_NON_BLOCKING);
        for (int i = 0; i < count; i++)
            if (strstr(kind, "function") != NULL)
                CHECK(cuLaunchHostFunc(streams[i], await_word, &words[round]));
            else
                wait_value(streams[i], &words[round], 1);
        for (int each = 1; each < operations; each++)
            for (int i = 0; i < count; i++)
                operate(streams[i], event, kernels[0],
                        strstr(kind, "graph") != NULL   ? 2
                        : strstr(kind, "mixed") != NULL ? (unsigned)each % 5
                                                        : 3);
        for (int i = 0; i < count && strstr(kind, "destroy") != NULL; i++)
            CHECK(cuStreamDestroy_v2(streams[i]));
        launch(kernels[0], other);
        atomic_store(&words[round], 1);
        for (int i = 0; i < count && strstr(kind, "destroy") == NULL; i++)
            CHECK(cuStreamSynchronize(streams[i]));
        CHECK(cuStreamSynchronize(other));
    }
}

static CUstream common;
static _Atomic uint32_t put; /* number of waits so far */
static _Atomic bool ended;

static void *end_waits(void *unused) {
    while (!atomic_load(&ended)) {
        uint32_t passed = atomic_load(&put);
        usleep(300);
        atomic_store(&words[0], passed);
    }
    return unused;
}

/* Launch kernels into the common stream, a few at a time. */
static void *launch_beside(void *unused) {
    CHECK(cuCtxSetCurrent(context));
    while (!atomic_load(&ended)) {
        for (int i = 0; i < 3; i++)
            launch(kernels[2], common);
        CHECK(cuStreamSynchronize(common));
    }
    return unused;
}

static void CUDA_CB pause_short(void *unused) {
    (void)unused;
    usleep(50);
}

static void share(const char *kind, uint32_t rounds) {
    pthread_t threads[3];
    CUstream third = make(CU_STREAM_NON_BLOCKING);
    CUevent event = make_event();
    common = make(CU_STREAM_NON_BLOCKING);
    pthread_create(&threads[0], NULL, end_waits, NULL);
    for (int i = 1; i < 3; i++)
        pthread_create(&threads[i], NULL, launch_beside, NULL);
    for (uint32_t i = 1; i <= rounds; i++) {
        bool by_event = strcmp(kind, "event") == 0, called = strcmp(kind, "function") == 0;
        if (called)
            CHECK(cuLaunchHostFunc(common, pause_short, NULL));
        else
            wait_value(by_event ? third : common, &words[0], i);
        if (by_event) {
            CHECK(cuEventRecord(event, third));
            CHECK(cuStreamWaitEvent(common, event, 0));
        }
        atomic_store(&put, i);
        if (i % 3 == 0)
            launch(kernels[0], common);
        usleep(i % 7 * 100);
    }
    for (; atomic_load(&words[0]) < rounds; usleep(100))
        ;
    atomic_store(&ended, true);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
}

static uint64_t seed;
static __thread uint64_t state;

static unsigned below(unsigned end) { /* xorshift64 */
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (unsigned)(state >> 20) % end;
}

static CUstream some(void) {
    return make(below(4) == 0 ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING);
}

/* Mutexes of the threads, which host functions lock. Static, because such a function may run after its thread has
 * ended. */
static pthread_mutex_t mutexes[THREADS] = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER,
                                           PTHREAD_MUTEX_INITIALIZER};

static void *live(void *index) {
    pthread_mutex_t *mutex = &mutexes[(uintptr_t)index];
    CUstream streams[STREAMS], other;
    CUevent event, second;
    state = seed * 7919 + (uintptr_t)index * 104729 + 1;
    CHECK(cuCtxSetCurrent(context));
    event = make_event();
    second = make_event();
    other = some();
    for (int i = 0; i < STREAMS; i++)
        streams[i] = some();
    for (unsigned step = 0, steps = 20 + below(60); step < steps; step++) {
        _Atomic uint32_t *word = &words[(uintptr_t)index * 256 + step];
        unsigned kind = below(4), end = below(4), operations = below(12) == 0 ? FULL - below(123) : 1 + below(12);
        CUstream stream = streams[below(STREAMS)], before = streams[below(STREAMS)];
        if (operations > 500) /* with earlier operations in the stream, its queue in the driver would overflow even
                                 without the hook */
            for (int i = 0; i < STREAMS; i++)
                CHECK(cuStreamSynchronize(streams[i]));
        if (end == 3)
            pthread_mutex_lock(mutex);
        if (end == 3)
            CHECK(cuLaunchHostFunc(stream, lock_once, mutex));
        else if (kind == 0)
            CHECK(cuLaunchHostFunc(stream, await_word, word));
        else
            wait_value(kind == 1 ? before : stream, word, 1);
        if (end != 3 && kind == 1 && before != stream) {
            CHECK(cuEventRecord(event, before));
            CHECK(cuStreamWaitEvent(stream, event, 0));
        }
        for (unsigned i = 1; i < operations; i++)
            operate(stream, event, kernels[operations > 500 ? 0 : below(KERNELS)], below(6));
        for (unsigned i = 1 + below(5); i > 0; i--)
            operate(other, second, kernels[below(KERNELS)], 3);
        switch (end) {
        case 0: CHECK(cuStreamWriteValue32_v2(other, address(word), 1, 0)); break;
        case 1: CHECK(cuStreamSynchronize(other)); __attribute__((fallthrough));
        case 2: atomic_store(word, 1); break;
        default: pthread_mutex_unlock(mutex); break;
        }
        if (below(6) == 0)
            CHECK(cuStreamSynchronize(stream));
        if (below(10) == 0) {
            unsigned ended = below(STREAMS);
            CHECK(cuStreamDestroy_v2(streams[ended]));
            streams[ended] = some();
        }
        if (below(8) == 0)
            usleep(below(20000));
    }
    for (int i = 0; i < STREAMS; i++)
        CHECK(cuStreamSynchronize(streams[i]));
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 3)
        return 2;
    begin();
    if (strcmp(argv[1], "order") == 0) {
        order(argv[2], (uint32_t)atoi(argv[3]));
    } else if (strcmp(argv[1], "full") == 0) {
        full(argv[2], atoi(argv[3]), atoi(argv[4]));
    } else if (strcmp(argv[1], "shared") == 0) {
        share(argv[2], (uint32_t)atoi(argv[3]));
    } else {
        pthread_t threads[THREADS];
        seed = strtoull(argv[2], NULL, 10);
        uintptr_t count = 1 + seed % THREADS;
        for (uintptr_t i = 0; i < count; i++)
            pthread_create(&threads[i], NULL, live, (void *)i);
        for (uintptr_t i = 0; i < count; i++)
            pthread_join(threads[i], NULL);
    }
    return 0;
}
