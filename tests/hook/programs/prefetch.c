/* A program that computes in one stream while it loads its next batches in another: prefetch SECONDS loads|computes.
 *
 * Kernels of 2 ms follow each other. With `loads`, a second stream always contains about 50 ms of copies from the host,
 * then a function of the program, and then a wait for a word that the program writes. Prints the number of kernels that
 * ran.
 */
#include <cuda.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { AHEAD = 8, COPIES = 16, COPY_BYTES = 64 << 20 };

static uint32_t batches_wanted;
static volatile uint32_t batches_loaded;

static void check(CUresult result, int line) {
    if (result == CUDA_SUCCESS)
        return;
    fprintf(stderr, "prefetch: line %d: error %d\n", line, result);
    exit(1);
}

#define CHECK(call) check(call, __LINE__)

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void CUDA_CB loaded(void *ignored) {
    (void)ignored;
    batches_loaded++;
}

/* Put the next batch into the stream, unless a batch is still in it. */
static void load(CUstream stream, CUdeviceptr memory, const void *host) {
    static volatile uint32_t go;
    CUresult busy = cuStreamQuery(stream);
    if (busy == CUDA_ERROR_NOT_READY) {
        go = batches_wanted;
        return;
    }
    CHECK(busy);
    for (int i = 0; i < COPIES; i++)
        CHECK(cuMemcpyHtoDAsync_v2(memory, host, COPY_BYTES, stream));
    CHECK(cuLaunchHostFunc(stream, loaded, NULL));
    CHECK(cuStreamWaitValue32_v2(stream, (CUdeviceptr)(uintptr_t)&go, ++batches_wanted, CU_STREAM_WAIT_VALUE_GEQ));
}

int main(int argc, char **argv) {
    static char host[8];
    CUcontext context;
    CUmodule module;
    CUfunction kernel;
    CUstream computes, loads;
    CUevent done[AHEAD];
    CUdeviceptr memory;
    if (argc != 3)
        return 2;
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuModuleLoadData(&module, ""));
    CHECK(cuModuleGetFunction(&kernel, module, "spin_us_2000"));
    CHECK(cuStreamCreate(&computes, CU_STREAM_NON_BLOCKING));
    CHECK(cuStreamCreate(&loads, CU_STREAM_NON_BLOCKING));
    CHECK(cuMemAlloc_v2(&memory, COPY_BYTES));
    for (int i = 0; i < AHEAD; i++)
        CHECK(cuEventCreate(&done[i], CU_EVENT_DISABLE_TIMING));
    double end = now() + atof(argv[1]);
    unsigned long launched = 0;
    for (; now() < end; launched++) {
        if (launched >= AHEAD)
            CHECK(cuEventSynchronize(done[launched % AHEAD]));
        if (strcmp(argv[2], "loads") == 0)
            load(loads, memory, host);
        CHECK(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, computes, NULL, NULL));
        CHECK(cuEventRecord(done[launched % AHEAD], computes));
    }
    printf("%lu\n", launched);
    return 0;
}
