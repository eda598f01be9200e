/* Number of driver calls for each call of a program: drivercalls PATTERN ROUNDS [OTHER].
 *
 * PATTERN: a row of `patterns` below. Prints the median and the minimum number of driver calls of the thread per round,
 * as the double counts them, and the median nanoseconds of a round. The first tenth of the rounds does not count.
 * OTHER: a second thread runs. With `launch`, the median nanoseconds of its launches follow. With `capture`, the
 * program fails if the first thread's calls break the second thread's capture.
 */
#include <cuda.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { COPIES = 1000, BYTES = 4096, STREAMS = 4, BEHIND = 300, ROUNDS_MOST = 100000, SAMPLES = 20000 };

unsigned long long fake_driver_calls(void);

static CUcontext context;
static CUfunction kernel, longer;
static _Atomic uint32_t word;
static CUstream streams[STREAMS];
static CUevent event;
static CUdeviceptr device;
static char *pageable, *pinned;
static _Atomic bool over;

static void check(CUresult result, int line) {
    if (result == CUDA_SUCCESS)
        return;
    fprintf(stderr, "drivercalls: line %d: error %d\n", line, result);
    exit(1);
}

#define CHECK(call) check(call, __LINE__)

static void launch(CUstream stream) {
    CHECK(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
}

static void copy_batch(char *host) {
    static CUdeviceptr to[COPIES], from[COPIES];
    static size_t sizes[COPIES];
    size_t first = 0;
    CUmemcpyAttributes attributes = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
    for (int i = 0; i < COPIES; i++) {
        to[i] = device + (CUdeviceptr)i * BYTES;
        from[i] = (CUdeviceptr)(uintptr_t)(host + (size_t)i * BYTES);
        sizes[i] = 64;
    }
    CHECK(cuMemcpyBatchAsync_v2(to, from, sizes, COPIES, &attributes, &first, 1, streams[0]));
}

static void batch_pageable(void) {
    copy_batch(pageable);
}

static void batch_pinned(void) {
    copy_batch(pinned);
}

static void copy_unsaid(void) {
    CHECK(cuMemcpyAsync(device, (CUdeviceptr)(uintptr_t)pinned, BYTES, streams[0]));
}

static void copy_between(void) {
    CHECK(cuMemcpyAsync(device, device + BYTES, BYTES, streams[0]));
}

static void copy_asynchronous(void) {
    launch(streams[0]);
    CHECK(cuMemcpyHtoDAsync_v2(device, pageable, BYTES, streams[0]));
}

static void copy_with_busy(int busy) {
    for (int i = 0; i < busy; i++)
        launch(streams[i]);
    CHECK(cuMemcpyHtoD_v2(device, pageable, BYTES));
}

static void copy_with_one_busy(void) {
    copy_with_busy(1);
}

static void copy_with_all_busy(void) {
    copy_with_busy(STREAMS);
}

static void wait_event(void) {
    launch(streams[0]);
    CHECK(cuStreamWaitEvent(streams[0], event, 0));
}

static void CUDA_CB nothing(void *unused) {
    (void)unused;
}

/* The first round also runs a host function to its end. */
static void wait_event_later(void) {
    static bool ran;
    if (!ran) {
        CHECK(cuLaunchHostFunc(streams[0], nothing, NULL));
        CHECK(cuStreamSynchronize(streams[0]));
    }
    ran = true;
    wait_event();
}

/* Launch BEHIND kernels of 100 us behind a wait for a value, and then end that wait. In the first round there is no
 * wait, so the hook learns how long they take. */
static void launch_behind(void) {
    static bool learned;
    atomic_store(&word, 0);
    if (learned)
        CHECK(cuStreamWaitValue32_v2(streams[0], (CUdeviceptr)(uintptr_t)&word, 1, CU_STREAM_WAIT_VALUE_GEQ));
    learned = true;
    for (int i = 0; i < BEHIND; i++)
        CHECK(cuLaunchKernel(longer, 1, 1, 1, 1, 1, 1, 0, streams[0], NULL, NULL));
    atomic_store(&word, 1);
    CHECK(cuStreamSynchronize(streams[0]));
}

static void pool_pair(void) {
    CUdeviceptr address;
    CHECK(cuMemAllocAsync(&address, BYTES, streams[0]));
    CHECK(cuMemFreeAsync(address, streams[0]));
}

static void linear_pair(void) {
    CUdeviceptr address;
    CHECK(cuMemAlloc_v2(&address, BYTES));
    CHECK(cuMemFree_v2(address));
}

static void write_batch(void) {
    CUstreamBatchMemOpParams write = {
        .writeValue = {.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32, .address = (CUdeviceptr)(uintptr_t)pinned}};
    CHECK(cuStreamBatchMemOp_v2(streams[0], 1, &write, 0));
    launch(streams[0]);
}

static const struct {
    const char *name;
    void (*round)(void);
} patterns[] = {
    {"batch-pageable", batch_pageable},
    {"batch-pinned", batch_pinned},
    {"copy-unsaid", copy_unsaid},
    {"copy-between", copy_between},
    {"launch-copy-async", copy_asynchronous},
    {"launch-copy", copy_with_one_busy},
    {"launches-4-copy", copy_with_all_busy},
    {"launch-wait-event", wait_event},
    {"launch-wait-event-later", wait_event_later},
    {"launch-behind", launch_behind},
    {"pool-pair", pool_pair},
    {"linear-pair", linear_pair},
    {"write-batch", write_batch},
};

static int compare(const void *a, const void *b) {
    uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;
    return (left > right) - (left < right);
}

static uint64_t median(uint64_t *values, int count) {
    qsort(values, (size_t)count, sizeof *values, compare);
    return values[count / 2];
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Launch until the rounds are over. After each launch a pause lets the stream become idle. */
static void *launch_on(void *unused) {
    static uint64_t took[SAMPLES];
    int count = 0;
    (void)unused;
    CHECK(cuCtxSetCurrent(context));
    for (; !atomic_load(&over); count++) {
        uint64_t begun = now_ns();
        launch(streams[STREAMS - 1]);
        took[count % SAMPLES] = now_ns() - begun;
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    }
    printf("%llu\n", (unsigned long long)median(took, count < SAMPLES ? count : SAMPLES));
    return NULL;
}

/* Capture launches until the rounds are over. */
static void *capture(void *unused) {
    CUgraph graph;
    (void)unused;
    CHECK(cuCtxSetCurrent(context));
    while (!atomic_load(&over)) {
        CHECK(cuStreamBeginCapture_v2(streams[STREAMS - 1], CU_STREAM_CAPTURE_MODE_GLOBAL));
        launch(streams[STREAMS - 1]);
        CHECK(cuStreamEndCapture(streams[STREAMS - 1], &graph));
        CHECK(cuGraphDestroy(graph));
    }
    return NULL;
}

int main(int argc, char **argv) {
    static uint64_t calls[ROUNDS_MOST], took[ROUNDS_MOST];
    CUmodule module;
    pthread_t other;
    unsigned pattern = 0, count = sizeof patterns / sizeof *patterns;
    int rounds = argc >= 3 ? atoi(argv[2]) : 0;
    while (argc >= 3 && pattern < count && strcmp(patterns[pattern].name, argv[1]) != 0)
        pattern++;
    if (argc < 3 || pattern == count || rounds < 1 || rounds > ROUNDS_MOST) {
        fprintf(stderr, "drivercalls PATTERN ROUNDS [launch|capture], with the double of libcuda\n");
        return 2;
    }
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuModuleLoadData(&module, ""));
    CHECK(cuModuleGetFunction(&kernel, module, "noop"));
    CHECK(cuModuleGetFunction(&longer, module, "spin_us_100"));
    CHECK(cuMemAlloc_v2(&device, (size_t)COPIES * BYTES));
    CHECK(cuMemAllocHost_v2((void **)&pinned, (size_t)COPIES * BYTES));
    CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    for (int i = 0; i < STREAMS; i++)
        CHECK(cuStreamCreate(&streams[i], CU_STREAM_DEFAULT));
    CHECK(cuEventRecord(event, streams[1]));
    launch(streams[0]); /* the hook queries the number of devices at the first launch */
    pageable = calloc(COPIES, BYTES);
    bool captures = argc > 3 && strcmp(argv[3], "capture") == 0;
    if (argc > 3 && pthread_create(&other, NULL, captures ? capture : launch_on, NULL) != 0)
        return 1;
    for (int round = -rounds / 10; round < rounds; round++) {
        unsigned long long before = fake_driver_calls();
        uint64_t begun = now_ns();
        patterns[pattern].round();
        if (round >= 0) {
            took[round] = now_ns() - begun;
            calls[round] = fake_driver_calls() - before;
        }
        if (!captures && round % 32 == 0) /* an open capture forbids to synchronize */
            CHECK(cuStreamSynchronize(streams[0]));
    }
    unsigned long long middle = median(calls, rounds);
    printf("%llu %llu %llu\n", middle, (unsigned long long)calls[0], (unsigned long long)median(took, rounds));
    atomic_store(&over, true);
    if (argc > 3)
        pthread_join(other, NULL);
    return 0;
}
