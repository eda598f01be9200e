/* Threads that each hold a few allocations of 1 MiB from the device's pool at a time, on a stream of their own.
 *
 *     poolthreads THREADS ROUNDS     ends with status 1 if an allocation is refused
 */
#include <cuda.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { HELD = 8, THREADS_MOST = 64 };

static CUcontext context;
static int rounds;

static void check(const char *what, CUresult result) {
    if (result == CUDA_SUCCESS)
        return;
    fprintf(stderr, "%s: %d\n", what, (int)result);
    _exit(1);
}

#define CHECK(call) check(#call, call)

static void *use(void *unused) {
    CUstream stream;
    CUdeviceptr held[HELD];
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (int round = 0; round < rounds; round++) {
        for (int i = 0; i < HELD; i++)
            CHECK(cuMemAllocAsync(&held[i], 1 << 20, stream));
        for (int i = 0; i < HELD; i++)
            CHECK(cuMemFreeAsync(held[i], stream));
        if (round % 10 == 9)
            CHECK(cuStreamSynchronize(stream));
    }
    CHECK(cuStreamSynchronize(stream));
    CHECK(cuStreamDestroy_v2(stream));
    return unused;
}

int main(int argc, char **argv) {
    pthread_t threads[THREADS_MOST];
    int count = argc == 3 ? atoi(argv[1]) : 0;
    if (count < 1 || count > THREADS_MOST)
        return 2;
    rounds = atoi(argv[2]);
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    use(NULL); /* the hook learns from one thread by how much the driver lets the pool grow */
    for (int i = 0; i < count; i++)
        pthread_create(&threads[i], NULL, use, NULL);
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    return 0;
}
