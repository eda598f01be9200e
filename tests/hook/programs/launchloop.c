/* Launches kernels in a loop, and reports how much GPU time it got.
 *
 * Every line on standard output is one JSON object: {"event": "start" | "progress" | "end" | "error", ...}. The program
 * runs until --seconds are over, every thread's --launches have finished or SIGTERM arrives, and then exits with 0.
 * After a CUDA error it exits with 1. Its kernels (names such as "spin_us_2000") exist only in the test double of
 * libcuda, so the program measures the sharing, not a GPU.
 */
#include <cuda.h>
#include <dlfcn.h>
#include <getopt.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_STREAMS = 64, EVENTS = 8192, DELAYS = 4096 };

static struct {
    unsigned long kernel_us;
    double seconds;
    double report;
    unsigned long long memory, chunk;
    unsigned streams, threads, sync_every, event_every;
    unsigned long idle_us, arrive_us, launches;
    unsigned graph_nodes;
    int device;
    bool per_thread;
    const char *resolve, *call, *function, *spread;
} options = {.kernel_us = 2000,
             .report = 1,
             .streams = 1,
             .threads = 1,
             .event_every = 1,
             .graph_nodes = 1,
             .resolve = "symbol",
             .call = "kernel",
             .spread = "regular"};

/* Functions that are looked up in the way that an option selects. All others are called by symbol. */
static struct {
    CUresult (*launch)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                       void **, void **);
    CUresult (*launch_ex)(const CUlaunchConfig *, CUfunction, void **, void **);
    CUresult (*launch_cooperative)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                   CUstream, void **);
    CUresult (*launch_graph)(CUgraphExec, CUstream);
    CUresult (*alloc)(CUdeviceptr *, size_t);
} calls;

struct worker {
    pthread_t thread;
    CUstream streams[MAX_STREAMS];
    CUgraphExec graphs[MAX_STREAMS];
    _Atomic uint64_t launched, completed;
    CUevent events[EVENTS];
    uint64_t counts[EVENTS];
    uint64_t first, last; /* range [first, last) of events that are recorded and not yet seen complete */
    pthread_mutex_t lock;
    uint64_t random;
    double arrived;        /* time at which the present step arrived, with --arrive-us */
    double delays[DELAYS]; /* delays since the last report: time of each awaited step beyond the time of its kernels */
    unsigned delay_count;
};

static CUcontext context;
static CUfunction function;
static struct worker *workers;
static _Atomic bool stop;
static _Atomic unsigned finished; /* number of threads whose launches have finished */

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void check(const char *what, CUresult result) {
    const char *name = NULL;
    if (result == CUDA_SUCCESS)
        return;
    if (atomic_load(&stop))
        pthread_exit(NULL);
    cuGetErrorName(result, &name);
    printf("{\"event\": \"error\", \"call\": \"%s\", \"error\": \"%s\", \"code\": %d}\n", what, name ? name : "?",
           result);
    fflush(stdout);
    _exit(1);
}

#define CHECK(call) check(#call, call)

static void *resolve(void *library, const char *base, const char *symbol, const char *per_thread_symbol) {
    const char *name = options.per_thread && per_thread_symbol ? per_thread_symbol : symbol;
    void *found = NULL;
    if (strcmp(options.resolve, "dlsym") == 0) {
        found = dlsym(library, name);
    } else {
        CUresult (*get)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *) =
            (CUresult (*)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *))dlsym(
                library, "cuGetProcAddress_v2");
        CUdriverProcAddressQueryResult status;
        int version;
        CHECK(cuDriverGetVersion(&version));
        if (strcmp(options.resolve, "getproc11") == 0) {
            CUresult (*old)(const char *, void **, int, cuuint64_t) =
                (CUresult (*)(const char *, void **, int, cuuint64_t))dlsym(library, "cuGetProcAddress");
            CHECK(old(base, &found, version, options.per_thread ? CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM : 0));
        } else {
            CHECK(get(base, &found, version, options.per_thread ? CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM : 0,
                      &status));
        }
    }
    if (found == NULL) {
        fprintf(stderr, "launchloop: %s not found by %s\n", name, options.resolve);
        exit(1);
    }
    return found;
}

static void resolve_all(void) {
    if (strcmp(options.resolve, "symbol") == 0) {
        calls.launch = options.per_thread ? cuLaunchKernel_ptsz : cuLaunchKernel;
        calls.launch_ex = options.per_thread ? cuLaunchKernelEx_ptsz : cuLaunchKernelEx;
        calls.launch_cooperative = options.per_thread ? cuLaunchCooperativeKernel_ptsz : cuLaunchCooperativeKernel;
        calls.launch_graph = options.per_thread ? cuGraphLaunch_ptsz : cuGraphLaunch;
        calls.alloc = cuMemAlloc_v2;
        return;
    }
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL) {
        fprintf(stderr, "launchloop: %s\n", dlerror());
        exit(1);
    }
    *(void **)&calls.launch = resolve(library, "cuLaunchKernel", "cuLaunchKernel", "cuLaunchKernel_ptsz");
    *(void **)&calls.launch_ex = resolve(library, "cuLaunchKernelEx", "cuLaunchKernelEx", "cuLaunchKernelEx_ptsz");
    *(void **)&calls.launch_cooperative =
        resolve(library, "cuLaunchCooperativeKernel", "cuLaunchCooperativeKernel", "cuLaunchCooperativeKernel_ptsz");
    *(void **)&calls.launch_graph = resolve(library, "cuGraphLaunch", "cuGraphLaunch", "cuGraphLaunch_ptsz");
    *(void **)&calls.alloc = resolve(library, "cuMemAlloc", "cuMemAlloc_v2", NULL);
}

static CUgraphExec capture_graph(CUstream stream) {
    CUgraph graph;
    CUgraphExec exec;
    CHECK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    for (unsigned i = 0; i < options.graph_nodes; i++)
        CHECK(calls.launch(function, 1, 1, 1, 32, 1, 1, 0, stream, NULL, NULL));
    CHECK(cuStreamEndCapture(stream, &graph));
    CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    CHECK(cuGraphDestroy(graph));
    return exec;
}

static void launch(struct worker *worker, unsigned which) {
    CUstream stream = worker->streams[which];
    if (strcmp(options.call, "kernel") == 0) {
        CHECK(calls.launch(function, 1, 1, 1, 32, 1, 1, 0, stream, NULL, NULL));
    } else if (strcmp(options.call, "ex") == 0) {
        CUlaunchConfig config = {.gridDimX = 1,
                                 .gridDimY = 1,
                                 .gridDimZ = 1,
                                 .blockDimX = 32,
                                 .blockDimY = 1,
                                 .blockDimZ = 1,
                                 .hStream = stream};
        CHECK(calls.launch_ex(&config, function, NULL, NULL));
    } else if (strcmp(options.call, "cooperative") == 0) {
        CHECK(calls.launch_cooperative(function, 1, 1, 1, 32, 1, 1, 0, stream, NULL));
    } else {
        CHECK(calls.launch_graph(worker->graphs[which], stream));
    }
}

/* Update `completed` by the events that have passed. The caller holds the worker's lock. */
static void look(struct worker *worker) {
    while (worker->first < worker->last) {
        unsigned at = worker->first % EVENTS;
        CUresult result = cuEventQuery(worker->events[at]);
        if (result == CUDA_ERROR_NOT_READY)
            return;
        check("cuEventQuery", result);
        worker->completed = worker->counts[at];
        worker->first++;
    }
}

/* Return a random number greater than 0 and less than 1. */
static double draw(struct worker *worker) {
    worker->random = worker->random * 6364136223846793005ull + 1442695040888963407ull;
    return ((double)(worker->random >> 11) + 0.5) / (double)(1ull << 53);
}

/* Sleep between two launches. The length is constant, exponentially distributed, or bimodal (nine of ten are short, the
 * tenth is eleven times as long). The mean is --idle-us. */
static void idle(struct worker *worker) {
    double drawn = draw(worker), us = (double)options.idle_us;
    if (strcmp(options.spread, "exponential") == 0)
        us *= -log(drawn);
    else if (strcmp(options.spread, "bimodal") == 0)
        us *= drawn < 0.1 ? 5.5 : 0.5;
    struct timespec pause = {.tv_sec = (time_t)(us / 1e6), .tv_nsec = (long)(fmod(us, 1e6) * 1e3)};
    nanosleep(&pause, NULL);
}

/* Sleep until the next step arrives, and return the time of its arrival. Steps arrive as a Poisson process with a mean
 * interval of --arrive-us, independent of earlier steps. A step that has already arrived begins at once. */
static double next_arrival(struct worker *worker) {
    worker->arrived -= log(draw(worker)) * (double)options.arrive_us / 1e6;
    if (now() >= worker->arrived)
        return worker->arrived;
    struct timespec until = {.tv_sec = (time_t)worker->arrived, .tv_nsec = (long)(fmod(worker->arrived, 1) * 1e9)};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
    return now();
}

static void note_delay(struct worker *worker, double begun) {
    pthread_mutex_lock(&worker->lock);
    if (worker->delay_count < DELAYS)
        worker->delays[worker->delay_count++] = now() - begun - (double)(options.sync_every * options.kernel_us) / 1e6;
    pthread_mutex_unlock(&worker->lock);
}

static void *work(void *argument) {
    struct worker *worker = argument;
    CHECK(cuCtxSetCurrent(context));
    for (unsigned i = 0; i < options.streams; i++) {
        CHECK(cuStreamCreate(&worker->streams[i], CU_STREAM_NON_BLOCKING));
        if (strcmp(options.call, "graph") == 0)
            worker->graphs[i] = capture_graph(worker->streams[i]);
    }
    if (options.per_thread && options.streams == 1)
        worker->streams[0] = NULL;
    for (unsigned i = 0; i < EVENTS; i++)
        CHECK(cuEventCreate(&worker->events[i], CU_EVENT_DISABLE_TIMING));
    double begun = worker->arrived = now();
    for (uint64_t n = 0; !atomic_load(&stop) && (options.launches == 0 || n < options.launches); n++) {
        unsigned which = (unsigned)(n % options.streams);
        if (options.sync_every > 0 && n % options.sync_every == 0)
            begun = options.arrive_us > 0 ? next_arrival(worker) : now();
        launch(worker, which);
        worker->launched = n + 1;
        if ((n + 1) % options.event_every == 0) {
            pthread_mutex_lock(&worker->lock);
            if (worker->last - worker->first == EVENTS)
                look(worker);
            if (worker->last - worker->first < EVENTS) {
                unsigned at = worker->last % EVENTS;
                CUstream stream =
                    options.per_thread && options.streams == 1 ? CU_STREAM_PER_THREAD : worker->streams[which];
                CHECK(cuEventRecord(worker->events[at], stream));
                worker->counts[at] = n + 1;
                worker->last++;
            }
            pthread_mutex_unlock(&worker->lock);
        }
        if (options.sync_every > 0 && (n + 1) % options.sync_every == 0) {
            CHECK(cuStreamSynchronize(options.per_thread && options.streams == 1 ? CU_STREAM_PER_THREAD
                                                                                 : worker->streams[which]));
            note_delay(worker, begun);
        }
        if (options.idle_us > 0)
            idle(worker);
    }
    if (atomic_load(&stop))
        return NULL;
    CHECK(cuCtxSynchronize());
    if (atomic_fetch_add(&finished, 1) + 1 == options.threads)
        kill(getpid(), SIGTERM); /* the main thread waits for this signal */
    return NULL;
}

static unsigned long long size_option(const char *text) {
    char *end;
    unsigned long long value = strtoull(text, &end, 10);
    switch (*end) {
    case 'K': return value << 10;
    case 'M': return value << 20;
    case 'G': return value << 30;
    default: return value;
    }
}

/* Print the delays of the steps since the last report. */
static void report_delays(void) {
    const char *comma = "";
    printf("\"delays_ms\": [");
    for (unsigned i = 0; i < options.threads; i++) {
        if (pthread_mutex_trylock(&workers[i].lock) != 0)
            continue;
        for (unsigned n = 0; n < workers[i].delay_count; n++, comma = ", ")
            printf("%s%.3f", comma, workers[i].delays[n] * 1e3);
        workers[i].delay_count = 0;
        pthread_mutex_unlock(&workers[i].lock);
    }
    printf("]");
}

static void report(const char *event, double start, double *last_time, uint64_t *last_completed, uint64_t allocated,
                   uint64_t refused) {
    uint64_t launched = 0, completed = 0;
    for (unsigned i = 0; i < options.threads; i++) {
        if (pthread_mutex_trylock(&workers[i].lock) ==
            0) { /* the lock's holder waits in a launch for its turn, so the worker's counts do not change */
            look(&workers[i]);
            pthread_mutex_unlock(&workers[i].lock);
        }
        launched += workers[i].launched;
        completed += workers[i].completed;
    }
    double time = now(), kernel = (double)options.kernel_us / 1e6, elapsed = time - start;
    printf("{\"event\": \"%s\", \"elapsed\": %.3f, \"launches\": %llu, \"completed\": %llu, \"asked_seconds\": %.6f, "
           "\"gpu_seconds\": %.6f, \"share\": %.4f, \"recent_share\": %.4f, \"allocated\": %llu, "
           "\"refused_allocations\": %llu, ",
           event, elapsed, (unsigned long long)launched, (unsigned long long)completed, (double)launched * kernel,
           (double)completed * kernel, (double)completed * kernel / elapsed,
           time > *last_time ? (double)(completed - *last_completed) * kernel / (time - *last_time) : 0.0,
           (unsigned long long)allocated, (unsigned long long)refused);
    report_delays();
    printf("}\n");
    *last_time = time;
    *last_completed = completed;
}

static void usage(void) {
    puts("launchloop [--kernel-us N=2000] [--function NAME=spin_us_N] [--seconds S=0: until SIGTERM] [--report S=1]\n"
         "           [--memory BYTES[K|M|G]=0] [--chunk BYTES=all at once] [--streams N=1] [--threads N=1]\n"
         "           [--sync-every N=0: never] [--event-every N=1] [--idle-us N=0]\n"
         "           [--spread regular|exponential|bimodal: of the idle times]\n"
         "           [--arrive-us N=0: mean time between two steps of --sync-every launches that come as a Poisson "
         "process]\n"
         "           [--launches N=0: without end]\n"
         "           [--device N=0] [--per-thread-stream]\n"
         "           [--resolve symbol|dlsym|getproc|getproc11] [--call kernel|ex|cooperative|graph] [--graph-nodes "
         "N=1]");
}

static void parse(int argc, char **argv) {
    static const struct option names[] = {{"kernel-us", 1, NULL, 'k'},
                                          {"function", 1, NULL, 'f'},
                                          {"seconds", 1, NULL, 's'},
                                          {"report", 1, NULL, 'r'},
                                          {"memory", 1, NULL, 'm'},
                                          {"chunk", 1, NULL, 'c'},
                                          {"streams", 1, NULL, 'n'},
                                          {"threads", 1, NULL, 't'},
                                          {"sync-every", 1, NULL, 'y'},
                                          {"event-every", 1, NULL, 'e'},
                                          {"idle-us", 1, NULL, 'i'},
                                          {"spread", 1, NULL, 'S'},
                                          {"arrive-us", 1, NULL, 'A'},
                                          {"launches", 1, NULL, 'l'},
                                          {"device", 1, NULL, 'd'},
                                          {"per-thread-stream", 0, NULL, 'p'},
                                          {"resolve", 1, NULL, 'R'},
                                          {"call", 1, NULL, 'C'},
                                          {"graph-nodes", 1, NULL, 'g'},
                                          {"help", 0, NULL, 'h'},
                                          {0}};
    for (int option; (option = getopt_long(argc, argv, "h", names, NULL)) != -1;)
        switch (option) {
        case 'k': options.kernel_us = strtoul(optarg, NULL, 10); break;
        case 'f': options.function = optarg; break;
        case 's': options.seconds = strtod(optarg, NULL); break;
        case 'r': options.report = strtod(optarg, NULL); break;
        case 'm': options.memory = size_option(optarg); break;
        case 'c': options.chunk = size_option(optarg); break;
        case 'n': options.streams = (unsigned)strtoul(optarg, NULL, 10); break;
        case 't': options.threads = (unsigned)strtoul(optarg, NULL, 10); break;
        case 'y': options.sync_every = (unsigned)strtoul(optarg, NULL, 10); break;
        case 'e': options.event_every = (unsigned)strtoul(optarg, NULL, 10); break;
        case 'i': options.idle_us = strtoul(optarg, NULL, 10); break;
        case 'S': options.spread = optarg; break;
        case 'A': options.arrive_us = strtoul(optarg, NULL, 10); break;
        case 'l': options.launches = strtoul(optarg, NULL, 10); break;
        case 'd': options.device = (int)strtol(optarg, NULL, 10); break;
        case 'p': options.per_thread = true; break;
        case 'R': options.resolve = optarg; break;
        case 'C': options.call = optarg; break;
        case 'g': options.graph_nodes = (unsigned)strtoul(optarg, NULL, 10); break;
        default: usage(); exit(option == 'h' ? 0 : 2);
        }
    if (optind < argc || options.streams < 1 || options.streams > MAX_STREAMS || options.threads < 1 ||
        options.event_every < 1 || options.report <= 0) {
        usage();
        exit(2);
    }
}

int main(int argc, char **argv) {
    sigset_t signals;
    setvbuf(stdout, NULL, _IOLBF, 0);
    parse(argc, argv);
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);

    char name[64], gpu[256];
    CUdevice device;
    CUmodule module;
    CHECK(cuInit(0));
    resolve_all();
    CHECK(cuDeviceGet(&device, options.device));
    CHECK(cuDeviceGetName(gpu, sizeof gpu, device));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuModuleLoadData(&module, "test double"));
    snprintf(name, sizeof name, "spin_us_%lu", options.kernel_us);
    CHECK(cuModuleGetFunction(&function, module, options.function ? options.function : name));

    uint64_t allocated = 0, refused = 0;
    unsigned long long chunk = options.chunk ? options.chunk : options.memory;
    for (unsigned long long asked = 0; asked < options.memory; asked += chunk) {
        CUdeviceptr memory;
        CUresult result = calls.alloc(&memory, chunk);
        if (result == CUDA_ERROR_OUT_OF_MEMORY)
            refused++;
        else {
            check("cuMemAlloc", result);
            allocated += chunk;
        }
    }
    size_t free_bytes, total_bytes;
    CHECK(cuMemGetInfo_v2(&free_bytes, &total_bytes));
    printf("{\"event\": \"start\", \"pid\": %d, \"gpu\": \"%s\", \"memory_free\": %zu, \"memory_total\": %zu, "
           "\"allocated\": %llu, "
           "\"refused_allocations\": %llu}\n",
           (int)getpid(), gpu, free_bytes, total_bytes, (unsigned long long)allocated, (unsigned long long)refused);

    workers = calloc(options.threads, sizeof *workers);
    double start = now(), deadline = options.seconds > 0 ? start + options.seconds : 1e300, last_time = start;
    uint64_t last_completed = 0;
    for (unsigned i = 0; i < options.threads; i++) {
        pthread_mutex_init(&workers[i].lock, NULL);
        workers[i].random = i + 1;
        if (pthread_create(&workers[i].thread, NULL, work, &workers[i]) != 0)
            exit(1);
    }
    for (double next = start + options.report;; next += options.report) {
        double until = next < deadline ? next : deadline, left = until - now();
        int signal = 0;
        if (left > 0) {
            struct timespec wait = {.tv_sec = (time_t)left, .tv_nsec = (long)((left - (double)(time_t)left) * 1e9)};
            signal = sigtimedwait(&signals, NULL, &wait);
        }
        if (signal > 0 || now() >= deadline)
            break;
        report("progress", start, &last_time, &last_completed, allocated, refused);
    }
    atomic_store(&stop, true);
    last_time = start;
    last_completed = 0;
    report("end", start, &last_time, &last_completed, allocated, refused);
    fflush(stdout);
    _exit(0); /* without joining: threads may wait for a turn for a long time */
}
