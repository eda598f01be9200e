/* Programs that leave gaps between their kernels, like real ones: eager training, decoding, a service, a notebook, and
 * ranks.
 *
 * Every line on standard output is one JSON object: {"event": "start" | "progress" | "end" | "error", ...}. `units` are
 * the finished steps, requests or cells. `latencies_ms` are the times from arrival to end of the requests since the
 * last line. The program runs until --seconds are over, --units have finished or SIGTERM arrives, and then exits with
 * 0. After a CUDA error it exits with 1. Its kernels exist only in the test double of libcuda.
 *
 * A step is a number of kernels, with host work before each launch, and then a gap: host work without launches. Several
 * steps may be in flight. Requests and cells arrive as a Poisson process, and the program waits for the end of each. A
 * rank's step ends with a collective, which occupies the GPU until all ranks have reached theirs.
 */
#include <cuda.h>
#include <fcntl.h>
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
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { MOST_IN_FLIGHT = 64, LATENCIES = 65536 };

/* Times in us. */
struct kind {
    const char *name;
    unsigned kernels;
    double host, kernel, gap; /* time of the host work before each launch; of a kernel; of the host work in the gap */
    double spread;            /* relative spread of host work and kernels, uniformly distributed */
    unsigned in_flight;       /* number of steps in flight */
    double rate;              /* requests per second; 0: the units are steps */
    bool collective;
};

static const struct kind kinds[] = {
    {"e22", 128, 86, 22, 1000, 0, 3, 0, false},     {"e45", 60, 110, 61, 1500, 0.7, 3, 0, false},
    {"e60", 60, 110, 81, 1500, 0.76, 3, 0, false},  {"decode", 90, 45, 14, 200, 0, 2, 0, false},
    {"busy", 1, 5, 1000, 0, 0, 3, 0, false},        {"service", 60, 50, 5, 300, 0, 1, 39, false},
    {"requests", 3, 100, 1000, 0, 0, 1, 39, false}, {"notebook", 50, 2000, 2000, 0, 0, 1, 0.25, false},
    {"rank", 20, 50, 2000, 0, 0, 1, 0, true},
};

static struct kind kind;
static struct {
    double seconds, report, slept; /* `slept`: part of the host work that the thread sleeps */
    unsigned long units, seed, ranks;
    const char *meet;
    int device;
} options = {.report = 1, .seed = 1, .ranks = 1};

static CUcontext context;
static CUstream stream;
static CUfunction spin, meet;
static CUevent events[MOST_IN_FLIGHT];
static _Atomic uint64_t *meeting;
static uint64_t met_at;
static _Atomic uint64_t units;
static _Atomic bool stop;
static uint64_t random_state;
static pthread_mutex_t latencies_lock = PTHREAD_MUTEX_INITIALIZER;
static double latencies[LATENCIES]; /* ms */
static unsigned latency_count;

static void check(const char *what, CUresult result) {
    const char *name = NULL;
    if (result == CUDA_SUCCESS)
        return;
    if (atomic_load(&stop))
        pthread_exit(NULL);
    cuGetErrorName(result, &name);
    printf("{\"event\": \"error\", \"call\": \"%s\", \"error\": \"%s\"}\n", what, name ? name : "?");
    fflush(stdout);
    _exit(1);
}

#define CHECK(call) check(#call, call)

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void sleep_until(double moment) {
    struct timespec until = {.tv_sec = (time_t)moment, .tv_nsec = (long)(fmod(moment, 1) * 1e9)};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
}

/* Return a random number greater than 0 and less than 1. */
static double draw(void) {
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return ((double)(random_state >> 11) + 0.5) / (double)(1ull << 53);
}

static double spread(double us) {
    return kind.spread > 0 ? us * (1 + kind.spread * (2 * draw() - 1)) : us;
}

/* Do host work for `us` microseconds: sleep first, then spin. */
static void work_on_host(double us) {
    double begun = now(), end = begun + us / 1e6;
    if (us <= 0)
        return;
    if (options.slept > 0)
        sleep_until(begun + us * options.slept / 1e6);
    while (now() < end)
        ;
}

static void launch_kernels(void) {
    for (unsigned i = 0; i < kind.kernels; i++) {
        work_on_host(spread(kind.host));
        uint64_t ns = (uint64_t)(spread(kind.kernel) * 1e3);
        void *arguments[] = {&ns};
        CHECK(cuLaunchKernel(spin, 1, 1, 1, 32, 1, 1, 0, stream, arguments, NULL));
    }
    if (kind.collective) {
        void *counter = meeting;
        met_at += options.ranks;
        void *arguments[] = {&counter, &met_at};
        CHECK(cuLaunchKernel(meet, 1, 1, 1, 32, 1, 1, 0, stream, arguments, NULL));
    }
}

static void note_latency(double seconds) {
    pthread_mutex_lock(&latencies_lock);
    if (latency_count < LATENCIES)
        latencies[latency_count++] = seconds * 1e3;
    pthread_mutex_unlock(&latencies_lock);
}

/* Count a finished unit. Return false if it was the last one, or if the program must stop. */
static bool finished_one(void) {
    bool last = atomic_fetch_add(&units, 1) + 1 == options.units;
    if (last)
        kill(getpid(), SIGTERM); /* the main thread waits for this signal */
    return !last && !atomic_load(&stop);
}

static void run_steps(void) {
    for (uint64_t step = 0;; step++) {
        launch_kernels();
        CHECK(cuEventRecord(events[step % kind.in_flight], stream));
        work_on_host(kind.gap);
        if (step + 1 < kind.in_flight)
            continue;
        CHECK(cuEventSynchronize(events[(step + 1) % kind.in_flight]));
        if (!finished_one())
            return;
    }
}

static void run_requests(void) {
    double arrived = now();
    do {
        arrived -= log(draw()) / kind.rate;
        if (now() < arrived)
            sleep_until(arrived);
        launch_kernels();
        CHECK(cuStreamSynchronize(stream));
        work_on_host(kind.gap);
        note_latency(now() - arrived);
    } while (finished_one());
}

static void *work(void *unused) {
    (void)unused;
    prctl(PR_SET_TIMERSLACK, 1);
    CHECK(cuCtxSetCurrent(context));
    if (kind.rate > 0)
        run_requests();
    else
        run_steps();
    return NULL;
}

static void report(const char *event, double begun) {
    const char *comma = "";
    printf("{\"event\": \"%s\", \"elapsed\": %.6f, \"units\": %llu, \"latencies_ms\": [", event, now() - begun,
           (unsigned long long)atomic_load(&units));
    pthread_mutex_lock(&latencies_lock);
    for (unsigned i = 0; i < latency_count; i++, comma = ", ")
        printf("%s%.3f", comma, latencies[i]);
    latency_count = 0;
    pthread_mutex_unlock(&latencies_lock);
    printf("]}\n");
}

static void usage(void) {
    puts("gaps e22|e45|e60|decode|busy|service|requests|notebook|rank\n"
         "     [--seconds S=0: until SIGTERM] [--units N=0: without end] [--report S=1] [--seed N=1] [--device N=0]\n"
         "     [--slept PART=0: of the host work, 0 to 1; the rest spins]\n"
         "     [--kernels N] [--kernel-us T] [--host-us T] [--gap-us T] [--in-flight N] [--rate R]\n"
         "     [--meet FILE: the ranks' counter, made by the first] [--ranks N=1]");
}

static void parse(int argc, char **argv) {
    static const struct option names[] = {
        {"seconds", 1, NULL, 's'}, {"units", 1, NULL, 'u'},     {"report", 1, NULL, 'r'},
        {"seed", 1, NULL, 'x'},    {"device", 1, NULL, 'd'},    {"slept", 1, NULL, 'l'},
        {"kernels", 1, NULL, 'n'}, {"kernel-us", 1, NULL, 'k'}, {"host-us", 1, NULL, 'h'},
        {"gap-us", 1, NULL, 'g'},  {"in-flight", 1, NULL, 'f'}, {"rate", 1, NULL, 'a'},
        {"meet", 1, NULL, 'm'},    {"ranks", 1, NULL, 'R'},     {0}};
    for (unsigned i = 0; argc > 1 && i < sizeof kinds / sizeof *kinds; i++)
        if (strcmp(argv[1], kinds[i].name) == 0)
            kind = kinds[i];
    optind = 2;
    for (int option; kind.name != NULL && (option = getopt_long(argc, argv, "", names, NULL)) != -1;)
        switch (option) {
        case 's': options.seconds = strtod(optarg, NULL); break;
        case 'u': options.units = strtoul(optarg, NULL, 10); break;
        case 'r': options.report = strtod(optarg, NULL); break;
        case 'x': options.seed = strtoul(optarg, NULL, 10); break;
        case 'd': options.device = (int)strtol(optarg, NULL, 10); break;
        case 'l': options.slept = strtod(optarg, NULL); break;
        case 'n': kind.kernels = (unsigned)strtoul(optarg, NULL, 10); break;
        case 'k': kind.kernel = strtod(optarg, NULL); break;
        case 'h': kind.host = strtod(optarg, NULL); break;
        case 'g': kind.gap = strtod(optarg, NULL); break;
        case 'f': kind.in_flight = (unsigned)strtoul(optarg, NULL, 10); break;
        case 'a': kind.rate = strtod(optarg, NULL); break;
        case 'm': options.meet = optarg; break;
        case 'R': options.ranks = strtoul(optarg, NULL, 10); break;
        default: kind.name = NULL;
        }
    if (kind.name == NULL || optind < argc || kind.in_flight < 1 || kind.in_flight > MOST_IN_FLIGHT ||
        options.report <= 0 || options.slept < 0 || options.slept > 1 || kind.collective != (options.meet != NULL)) {
        usage();
        exit(2);
    }
}

static void prepare(void) {
    CUdevice device;
    CUmodule module;
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, options.device));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuModuleLoadData(&module, "test double"));
    CHECK(cuModuleGetFunction(&spin, module, "spin_arg"));
    CHECK(cuModuleGetFunction(&meet, module, "meet"));
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (unsigned i = 0; i < kind.in_flight; i++)
        CHECK(cuEventCreate(&events[i], CU_EVENT_DISABLE_TIMING));
    if (options.meet == NULL)
        return;
    int file = open(options.meet, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    void *mapped = MAP_FAILED;
    if (file >= 0 && ftruncate(file, sizeof *meeting) == 0)
        mapped = mmap(NULL, sizeof *meeting, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) {
        perror(options.meet);
        exit(1);
    }
    meeting = mapped;
}

int main(int argc, char **argv) {
    sigset_t signals;
    pthread_t worker;
    setvbuf(stdout, NULL, _IOLBF, 0);
    parse(argc, argv);
    random_state = options.seed;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
    prepare();
    printf("{\"event\": \"start\", \"pid\": %d, \"kind\": \"%s\"}\n", (int)getpid(), kind.name);
    double begun = now(), deadline = options.seconds > 0 ? begun + options.seconds : 1e300;
    if (pthread_create(&worker, NULL, work, NULL) != 0)
        exit(1);
    for (double next = begun + options.report;; next += options.report) {
        double left = (next < deadline ? next : deadline) - now();
        struct timespec wait = {.tv_sec = (time_t)left, .tv_nsec = (long)(fmod(left, 1) * 1e9)};
        if (left > 0 && sigtimedwait(&signals, NULL, &wait) > 0)
            break;
        if (now() >= deadline)
            break;
        report("progress", begun);
    }
    atomic_store(&stop, true);
    report("end", begun);
    fflush(stdout);
    _exit(0); /* without joining: a thread may wait for a turn for a long time */
}
