/* Random life of a process. All of it is determined by one seed. Its threads start and end all the time, and:
 * - launch by every kind of call, into their own streams and into shared streams;
 * - capture streams in every mode, and launch graphs;
 * - move memory, and put copies, host functions and host waits behind launches;
 * - block streams and fill them, while other streams continue;
 * - create and destroy streams and contexts;
 * - allocate, wait, sleep and fork.
 *
 *     randomlife SEED SECONDS THREADS
 *
 * Every CUDA call must succeed, except allocations, which may be refused. The last line of output has the counts as one
 * JSON object. Each launch that is not captured puts exactly one kernel or graph on a device.
 */
#include <cuda.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* BURST: launches of an empty kernel in a row. A thread spends most of that time inside launches. */
enum { MOST_STREAMS = 40, SHARED_STREAMS = 4, ALLOCATIONS = 6, KERNELS = 3, MOST_THREADS = 64, BURST = 3000 };
/* FILL: operations behind a wait, of the 1,024 that a stream can hold. ORDER_MS: time within which a stream that waits
 * for no other stream has done its work. */
enum { FILL = 900, ORDER_MS = 20000 };

/* State of one thread. */
struct life {
    uint64_t random;
    CUcontext context; /* a context of this thread only, or the primary context */
    bool own_context;
    CUmodule module;
    CUfunction kernels[KERNELS], empty;
    unsigned most_streams; /* most streams of this thread: few, or more than a thread of the hook stores in its slot */
    CUstream streams[MOST_STREAMS];
    CUdeviceptr memory[ALLOCATIONS];
    _Atomic uint32_t word; /* word for which a stream waits */
};

static struct {
    _Atomic uint64_t launches, graphs, captures, captures_broken, allocations, refused, forks, threads, contexts, holds;
} counts;

static _Atomic bool stop;
static CUcontext primary;
static CUstream shared[SHARED_STREAMS]; /* streams of the primary context, shared by all threads in it */
/* Lock for calls that stream capture forbids: many may run at a time, but none during a capture in global mode. */
static pthread_rwlock_t forbidden = PTHREAD_RWLOCK_INITIALIZER;

static void check(const char *what, CUresult result) {
    if (result == CUDA_SUCCESS)
        return;
    printf("{\"event\": \"error\", \"call\": \"%s\", \"result\": %d}\n", what, result);
    fflush(stdout);
    _exit(1);
}

#define CHECK(call) check(#call, call)

static uint64_t next(struct life *life) { /* xorshift64* */
    life->random ^= life->random >> 12;
    life->random ^= life->random << 25;
    life->random ^= life->random >> 27;
    return life->random * 0x2545f4914f6cdd1dull;
}

static unsigned below(struct life *life, unsigned end) {
    return (unsigned)((next(life) >> 33) % end);
}

static void pause_us(long us) {
    struct timespec time = {.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000};
    nanosleep(&time, NULL);
}

static void load(struct life *life) {
    static const char *const names[KERNELS] = {"spin_us_20", "spin_us_100", "spin_us_700"};
    CHECK(cuModuleLoadData(&life->module, ""));
    for (int i = 0; i < KERNELS; i++)
        CHECK(cuModuleGetFunction(&life->kernels[i], life->module, names[i]));
    CHECK(cuModuleGetFunction(&life->empty, life->module, "noop"));
}

static CUstream some_stream(struct life *life) {
    switch (below(life, 7)) {
    case 0: return NULL;
    case 1: return CU_STREAM_PER_THREAD;
    case 2:
        if (!life->own_context)
            return shared[below(life, SHARED_STREAMS)];
        break;
    default: break;
    }
    CUstream *stream = &life->streams[below(life, life->most_streams)];
    if (*stream == NULL)
        CHECK(cuStreamCreate(stream, below(life, 3) == 0 ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING));
    return *stream;
}

static void launch_on(struct life *life, CUstream stream) {
    CUfunction kernel = life->kernels[below(life, KERNELS)];
    CUlaunchConfig config = {
        .gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1, .blockDimY = 1, .blockDimZ = 1, .hStream = stream};
    switch (below(life, 4)) {
    case 0: CHECK(cuLaunchKernelEx(&config, kernel, NULL, NULL)); break;
    case 1: CHECK(cuLaunchCooperativeKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, NULL)); break;
    default: CHECK(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL)); break;
    }
}

static void launch(struct life *life) {
    CUstream stream = some_stream(life);
    for (unsigned i = below(life, 30) + 1; i > 0 && !atomic_load(&stop); i--) {
        launch_on(life, stream);
        atomic_fetch_add(&counts.launches, 1);
    }
}

static void burst(struct life *life) {
    CUstream stream = some_stream(life);
    for (unsigned i = below(life, BURST) + 1; i > 0 && !atomic_load(&stop); i--) {
        CHECK(cuLaunchKernel(life->empty, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
        atomic_fetch_add(&counts.launches, 1);
    }
}

static void capture(struct life *life) {
    static const CUstreamCaptureMode modes[] = {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
                                                CU_STREAM_CAPTURE_MODE_RELAXED};
    CUstream stream;
    CUgraph graph = NULL;
    CUgraphExec executable;
    CUstreamCaptureMode mode = modes[below(life, 3)];
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    if (mode == CU_STREAM_CAPTURE_MODE_GLOBAL)
        pthread_rwlock_wrlock(&forbidden);
    CHECK(cuStreamBeginCapture_v2(stream, mode));
    bool whole = true;
    for (unsigned i = below(life, 5) + 1; i > 0; i--) {
        CUfunction kernel = life->kernels[below(life, KERNELS)];
        whole &= cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL) == CUDA_SUCCESS;
        if (below(life, 3) == 0)
            pause_us(below(life, 3000)); /* time for the agent to grant the token and for the hook to return it */
    }
    whole &= cuStreamEndCapture(stream, &graph) == CUDA_SUCCESS && graph != NULL;
    if (mode == CU_STREAM_CAPTURE_MODE_GLOBAL)
        pthread_rwlock_unlock(&forbidden);
    atomic_fetch_add(whole ? &counts.captures : &counts.captures_broken, 1);
    if (!whole) {
        printf("{\"event\": \"broken\", \"mode\": %d}\n", (int)mode);
        fflush(stdout);
    } else {
        CHECK(cuGraphInstantiateWithFlags(&executable, graph, 0));
        for (unsigned i = below(life, 4); i > 0 && !atomic_load(&stop); i--) {
            CHECK(cuGraphLaunch(executable, some_stream(life)));
            atomic_fetch_add(&counts.graphs, 1);
        }
        CHECK(cuGraphExecDestroy(executable));
        CHECK(cuGraphDestroy(graph));
    }
    CHECK(cuStreamDestroy_v2(stream));
}

static void end_stream(struct life *life) {
    CUstream *stream = &life->streams[below(life, life->most_streams)];
    if (*stream != NULL)
        CHECK(cuStreamDestroy_v2(*stream)); /* perhaps with unfinished work */
    *stream = NULL;
}

static void synchronize(struct life *life) {
    CUstream stream = some_stream(life);
    pthread_rwlock_rdlock(&forbidden);
    CHECK(cuStreamSynchronize(stream));
    pthread_rwlock_unlock(&forbidden);
}

static void allocate(struct life *life) {
    CUdeviceptr *place = &life->memory[below(life, ALLOCATIONS)];
    CUresult result = CUDA_SUCCESS;
    size_t pitch;
    pthread_rwlock_rdlock(&forbidden);
    if (*place != 0)
        CHECK(cuMemFree_v2(*place));
    *place = 0;
    switch (below(life, 4)) {
    case 0: result = cuMemAllocPitch_v2(place, &pitch, 1000 + below(life, 1000), 1 + below(life, 200), 4); break;
    case 1: result = cuMemAllocManaged(place, 1 + below(life, 1 << 20), CU_MEM_ATTACH_GLOBAL); break;
    default: result = cuMemAlloc_v2(place, 1 + below(life, 1 << 24)); break;
    }
    pthread_rwlock_unlock(&forbidden);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        *place = 0;
        atomic_fetch_add(&counts.refused, 1);
    } else {
        check("an allocation", result);
        atomic_fetch_add(&counts.allocations, 1);
    }
}

/* Move memory on the device: to the gate each move is a launch. */
static void move(struct life *life) {
    CUdeviceptr from = life->memory[below(life, ALLOCATIONS)], to = life->memory[below(life, ALLOCATIONS)];
    CUstream stream = some_stream(life);
    if (from == 0 || to == 0)
        return;
    if (below(life, 2) == 0)
        CHECK(cuMemsetD8Async(to, 0, 1, stream));
    else
        CHECK(cuMemcpyDtoDAsync_v2(to, from, 1, stream));
    atomic_fetch_add(&counts.launches, 1);
}

static void CUDA_CB on_host(void *unused) {
    (void)unused;
    pause_us(300);
}

/* Put work that does not pass the gate into a stream, behind the launches of any threads. */
static void pass_by(struct life *life) {
    static const char page[4096];
    CUdeviceptr to = life->memory[below(life, ALLOCATIONS)];
    CUstream stream = some_stream(life);
    CUevent event;
    switch (below(life, 4)) {
    case 0:
        if (to != 0)
            CHECK(cuMemcpyHtoDAsync_v2(to, page, 1, stream));
        break;
    case 1:
        if (to == 0)
            break;
        pthread_rwlock_rdlock(&forbidden);
        CHECK(cuMemcpyHtoD_v2(to, page, 1));
        pthread_rwlock_unlock(&forbidden);
        break;
    case 2: CHECK(cuLaunchHostFunc(stream, on_host, NULL)); break;
    default:
        CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
        CHECK(cuEventRecord(event, stream));
        CHECK(cuStreamWaitEvent(some_stream(life), event, 0));
        CHECK(cuEventDestroy_v2(event));
    }
}

static uint64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static void CUDA_CB await_word(void *of) {
    while (atomic_load(&((struct life *)of)->word) == 0)
        pause_us(100);
}

/* Wait until the event has passed. Return false if it has not passed in time. */
static bool passes(CUevent event) {
    for (uint64_t end = now_ms() + ORDER_MS; now_ms() < end; pause_us(500)) {
        pthread_rwlock_rdlock(&forbidden);
        CUresult result = cuEventQuery(event);
        pthread_rwlock_unlock(&forbidden);
        if (result == CUDA_SUCCESS)
            return true;
        if (result != CUDA_ERROR_NOT_READY)
            check("cuEventQuery", result);
    }
    return false;
}

/* Block a stream, and release it after another stream, which waits for no stream, has done its work. Streams that wait
 * for the legacy stream are blocked only in a context of this thread's own, which no other thread uses. */
static void hold(struct life *life) {
    unsigned flags = life->own_context && below(life, 2) == 0 ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING;
    bool per_thread = life->own_context && below(life, 3) == 0;
    CUstream held, other = CU_STREAM_PER_THREAD;
    CUevent event;
    CHECK(cuStreamCreate(&held, flags));
    if (!per_thread)
        CHECK(cuStreamCreate(&other, flags));
    CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    if (life->own_context && below(life, 2) == 0) {
        launch_on(life, NULL);
        atomic_fetch_add(&counts.launches, 1);
    }
    for (unsigned i = below(life, 4); i > 0; i--, atomic_fetch_add(&counts.launches, 1))
        launch_on(life, held);
    atomic_store(&life->word, 0);
    if (below(life, 2) == 0)
        CHECK(cuStreamWaitValue32_v2(held, (CUdeviceptr)(uintptr_t)&life->word, 1, CU_STREAM_WAIT_VALUE_GEQ));
    else
        CHECK(cuLaunchHostFunc(held, await_word, life));
    for (unsigned i = below(life, 2) * FILL; i > 0; i--)
        CHECK(cuEventRecord(event, held));
    for (unsigned i = below(life, 3); i > 0; i--, atomic_fetch_add(&counts.launches, 1))
        launch_on(life, held);
    for (unsigned i = below(life, 5) + 1; i > 0; i--, atomic_fetch_add(&counts.launches, 1))
        launch_on(life, other);
    CHECK(cuEventRecord(event, other));
    if (!passes(event)) {
        printf("{\"event\": \"order\", \"flags\": %u, \"per_thread\": %d}\n", flags, per_thread);
        fflush(stdout);
    }
    atomic_store(&life->word, 1);
    CHECK(cuEventRecord(event, held));
    if (!passes(event))
        check("a stream that was released", CUDA_ERROR_UNKNOWN);
    CHECK(cuEventDestroy_v2(event));
    CHECK(cuStreamDestroy_v2(held));
    if (!per_thread)
        CHECK(cuStreamDestroy_v2(other));
    atomic_fetch_add(&counts.holds, 1);
}

/* Use stream-ordered memory from the device's pool. */
static void use_pool(struct life *life) {
    CUdeviceptr memory;
    CUstream stream = some_stream(life);
    CUresult result = cuMemAllocAsync(&memory, 1 + below(life, 1 << 23), stream);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        atomic_fetch_add(&counts.refused, 1);
        return;
    }
    check("cuMemAllocAsync", result);
    atomic_fetch_add(&counts.allocations, 1);
    CHECK(cuMemFreeAsync(memory, stream));
}

/* Use a physical allocation: map it and unmap it. */
static void use_virtual(struct life *life) {
    CUmemAllocationProp what = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUmemAccessDesc access = {.location = what.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;
    size_t size = (1 + below(life, 4)) << 21;
    CUresult result = cuMemCreate(&handle, size, &what, 0);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        atomic_fetch_add(&counts.refused, 1);
        return;
    }
    check("cuMemCreate", result);
    atomic_fetch_add(&counts.allocations, 1);
    CHECK(cuMemAddressReserve(&address, size, 0, 0, 0));
    CHECK(cuMemMap(address, size, 0, handle, 0));
    CHECK(cuMemSetAccess(address, size, &access, 1));
    if (below(life, 2) == 0)
        pause_us(below(life, 2000));
    CHECK(cuMemRelease(handle)); /* the mapping keeps the memory */
    CHECK(cuMemUnmap(address, size));
    CHECK(cuMemAddressFree(address, size));
}

static void use_array(struct life *life) {
    CUDA_ARRAY_DESCRIPTOR shape = {
        .Width = 64 + below(life, 512), .Height = 64, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4};
    CUarray array;
    pthread_rwlock_rdlock(&forbidden);
    CUresult result = cuArrayCreate_v2(&array, &shape);
    if (result == CUDA_SUCCESS)
        CHECK(cuArrayDestroy(array));
    pthread_rwlock_unlock(&forbidden);
    if (result != CUDA_ERROR_OUT_OF_MEMORY)
        check("cuArrayCreate", result);
    atomic_fetch_add(result == CUDA_SUCCESS ? &counts.allocations : &counts.refused, 1);
}

static void look(void) {
    size_t free_bytes, total;
    CHECK(cuMemGetInfo_v2(&free_bytes, &total));
    if (free_bytes > total)
        check("cuMemGetInfo: more free than there is", CUDA_ERROR_UNKNOWN);
}

/* The driver refuses calls in a child of a process that has used it. The child must end like any other. */
static void fork_child(void) {
    int status = -1;
    pid_t child = fork();
#ifdef __SANITIZE_THREAD__ /* ThreadSanitizer does not follow threads that such a child starts */
    if (child == 0)
        _exit(0);
#endif
    if (child == 0)
        _exit(cuInit(0) == CUDA_ERROR_NOT_INITIALIZED ? 0 : 1);
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0)
        check("a child of fork", CUDA_ERROR_UNKNOWN);
    atomic_fetch_add(&counts.forks, 1);
}

static void give_back(struct life *life) {
    for (int i = 0; i < MOST_STREAMS; i++)
        if (life->streams[i] != NULL)
            CHECK(cuStreamDestroy_v2(life->streams[i]));
    pthread_rwlock_rdlock(&forbidden);
    for (int i = 0; i < ALLOCATIONS; i++)
        if (life->memory[i] != 0)
            CHECK(cuMemFree_v2(life->memory[i]));
    if (life->own_context) /* waits for its work */
        CHECK(cuCtxDestroy_v2(life->context));
    pthread_rwlock_unlock(&forbidden);
}

static void *live(void *argument) {
    struct life life = {.random = (uint64_t)(uintptr_t)argument, .context = primary};
    life.most_streams = 4 + below(&life, 2) * below(&life, MOST_STREAMS - 3);
    atomic_fetch_add(&counts.threads, 1);
    life.own_context = below(&life, 4) == 0;
    if (life.own_context) {
        pthread_rwlock_rdlock(&forbidden);
        CHECK(cuCtxCreate_v2(&life.context, 0, 0));
        pthread_rwlock_unlock(&forbidden);
        atomic_fetch_add(&counts.contexts, 1);
    }
    CHECK(cuCtxSetCurrent(life.context));
    load(&life);
    for (unsigned steps = 10 + below(&life, 200); steps > 0 && !atomic_load(&stop); steps--)
        switch (below(&life, 20)) {
        case 0:
        case 1:
        case 2: capture(&life); break;
        case 3: end_stream(&life); break;
        case 4:
        case 5: synchronize(&life); break;
        case 6:
        case 7:
        case 8: allocate(&life); break;
        case 9:
            switch (below(&life, 6)) {
            case 0: look(); break;
            case 1: use_virtual(&life); break;
            case 2: use_array(&life); break;
            case 3: use_pool(&life); break;
            default: move(&life); break;
            }
            break;
        case 10: pause_us(below(&life, 20000)); break;
        case 11:
            if (below(&life, 8) == 0)
                fork_child();
            break;
        case 12: burst(&life); break;
        case 13: pass_by(&life); break;
        case 14: hold(&life); break;
        default: launch(&life); break;
        }
    give_back(&life);
    return NULL;
}

/* The first calls of a process may come from several threads at once. */
static void *begin(void *unused) {
    void *found;
    int devices;
    CHECK(cuGetProcAddress_v2("cuLaunchKernel", &found, 12000, 0, NULL));
    CHECK(cuInit(0));
    CHECK(cuDeviceGetCount(&devices));
    return unused;
}

int main(int argc, char **argv) {
    pthread_t threads[MOST_THREADS];
    if (argc != 4 || atoi(argv[3]) < 1 || atoi(argv[3]) > MOST_THREADS) {
        fprintf(stderr, "randomlife SEED SECONDS THREADS\n");
        return 2;
    }
    struct life own = {.random = strtoull(argv[1], NULL, 10) * 2 + 1};
    uint64_t end = now_ms() + (uint64_t)(atof(argv[2]) * 1000);
    unsigned count = (unsigned)atoi(argv[3]);
    for (unsigned i = 0; i < count; i++)
        if (pthread_create(&threads[i], NULL, begin, NULL) != 0)
            return 3;
    for (unsigned i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    CHECK(cuDevicePrimaryCtxRetain(&primary, 0));
    CHECK(cuCtxSetCurrent(primary));
    for (unsigned i = 0; i < SHARED_STREAMS; i++)
        CHECK(cuStreamCreate(&shared[i], i % 2 == 0 ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING));
    for (unsigned i = 0; i < count; i++)
        if (pthread_create(&threads[i], NULL, live, (void *)(uintptr_t)(next(&own) | 1)) != 0)
            return 3;
    for (unsigned i = 0; now_ms() < end; i = (i + 1) % count) { /* replace each thread that has ended */
        struct timespec soon;
        clock_gettime(CLOCK_REALTIME, &soon);
        soon.tv_nsec += 5000000;
        soon.tv_sec += soon.tv_nsec / 1000000000;
        soon.tv_nsec %= 1000000000;
        if (pthread_timedjoin_np(threads[i], NULL, &soon) == 0 &&
            pthread_create(&threads[i], NULL, live, (void *)(uintptr_t)(next(&own) | 1)) != 0)
            return 3;
    }
    atomic_store(&stop, true);
    for (unsigned i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    printf("{\"event\": \"end\", \"launches\": %llu, \"graphs\": %llu, \"captures\": %llu, \"captures_broken\": %llu, "
           "\"allocations\": %llu, \"refused\": %llu, \"forks\": %llu, \"threads\": %llu, \"contexts\": %llu, "
           "\"held\": %llu}\n",
           (unsigned long long)counts.launches, (unsigned long long)counts.graphs, (unsigned long long)counts.captures,
           (unsigned long long)counts.captures_broken, (unsigned long long)counts.allocations,
           (unsigned long long)counts.refused, (unsigned long long)counts.forks, (unsigned long long)counts.threads,
           (unsigned long long)counts.contexts, (unsigned long long)counts.holds);
    return 0;
}
