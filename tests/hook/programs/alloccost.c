/* Cost of an allocation to the calling thread: prints nanoseconds as one JSON object.
 *
 * - alloccost calls BYTES COUNT ROUNDS: in each of ROUNDS rounds, allocates BYTES COUNT times, then frees them. Prints
 *   the median time of one call of each kind. Made for a libcuda that does nothing (tests/doubles/hollow).
 * - alloccost pairs BYTES THREADS ROUNDS: allocates and frees BYTES of a memory pool in each of THREADS threads, ROUNDS
 *   times. Prints the median time of a pair; the first tenth of the rounds does not count.
 * - alloccost trip SOCKET ROUNDS: requests the memory use from a running agent, like a program that only queries it.
 *   Prints median and 99th percentile of the time from request to answer.
 */
#include <cuda.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>

#include "sharepod/protocol.h"

enum { COUNT_MOST = 1024, THREADS_MOST = 16, ROUNDS_MOST = 100000 };

static double samples[2][ROUNDS_MOST];

static double now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static int compare(const void *a, const void *b) {
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

static double part(double *of, int count, double fraction) {
    qsort(of, (size_t)count, sizeof *of, compare);
    return of[(int)(fraction * (count - 1))];
}

static void must(int good, const char *what) {
    if (!good) {
        fprintf(stderr, "alloccost: %s: %s\n", what, strerror(errno));
        exit(1);
    }
}

static void calls(size_t bytes, int count, int rounds) {
    CUcontext context;
    CUdeviceptr held[COUNT_MOST];
    must(cuInit(0) == CUDA_SUCCESS && cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS &&
             cuCtxSetCurrent(context) == CUDA_SUCCESS,
         "no context");
    for (int round = 0; round < rounds; round++) {
        double begun = now_ns();
        for (int i = 0; i < count; i++)
            must(cuMemAlloc_v2(&held[i], bytes) == CUDA_SUCCESS, "an allocation was refused");
        double between = now_ns();
        for (int i = 0; i < count; i++)
            must(cuMemFree_v2(held[i]) == CUDA_SUCCESS, "a free was refused");
        samples[0][round] = (between - begun) / count;
        samples[1][round] = (now_ns() - between) / count;
    }
    printf("{\"alloc_ns\": %.1f, \"free_ns\": %.1f}\n", part(samples[0], rounds, 0.5), part(samples[1], rounds, 0.5));
}

/* Task and measurements of each thread of `pairs`. */
struct churn {
    pthread_t thread;
    CUcontext context;
    size_t bytes;
    int rounds;
    double *took;
};

static void *churn(void *of) {
    const struct churn *churn = of;
    CUstream stream;
    CUdeviceptr address;
    must(cuCtxSetCurrent(churn->context) == CUDA_SUCCESS && cuStreamCreate(&stream, 0) == CUDA_SUCCESS, "no stream");
    for (int round = -churn->rounds / 10; churn->rounds == 0 || round < churn->rounds; round++) {
        double begun = now_ns();
        must(cuMemAllocAsync(&address, churn->bytes, stream) == CUDA_SUCCESS, "an allocation was refused");
        must(cuMemFreeAsync(address, stream) == CUDA_SUCCESS, "a free was refused");
        if (round >= 0 && churn->rounds > 0)
            churn->took[round] = now_ns() - begun;
    }
    return NULL;
}

static void pairs(size_t bytes, int threads, int rounds) {
    static struct churn churns[THREADS_MOST];
    CUcontext context;
    must(cuInit(0) == CUDA_SUCCESS && cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS, "no context");
    for (int i = 0; i < threads; i++) {
        churns[i] = (struct churn){.context = context,
                                   .bytes = bytes,
                                   .rounds = rounds / threads,
                                   .took = samples[0] + i * (rounds / threads)};
        must(pthread_create(&churns[i].thread, NULL, churn, &churns[i]) == 0, "no thread");
    }
    for (int i = 0; i < threads; i++)
        pthread_join(churns[i].thread, NULL);
    printf("{\"pair_ns\": %.1f}\n", part(samples[0], rounds / threads * threads, 0.5));
}

static void put(int socket, void *frame, uint16_t type, uint32_t size, uint32_t seq) {
    struct shp_header *header = frame;
    *header =
        (struct shp_header){.magic = SHP_MAGIC, .version = SHP_VERSION_MIN, .type = type, .size = size, .seq = seq};
    must(send(socket, frame, size, MSG_NOSIGNAL) == (ssize_t)size, "send");
}

static void trip(const char *path, int rounds) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    union {
        struct shp_header header;
        struct shp_welcome welcome;
    } answer;
    must(strlen(path) < sizeof address.sun_path, "the socket's path is too long");
    strcpy(address.sun_path, path);
    int agent = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    must(agent >= 0 && connect(agent, (struct sockaddr *)&address, sizeof address) == 0, path);
    struct shp_hello hello = {
        .version_min = SHP_VERSION_MIN, .version_max = SHP_VERSION_MIN, .flags = SHP_HELLO_OBSERVES};
    put(agent, &hello, SHP_HELLO, sizeof hello, 0);
    must(recv(agent, &answer, sizeof answer, 0) > 0 && answer.header.type == SHP_WELCOME, "no welcome");
    for (int round = 0; round < rounds; round++) {
        struct shp_meminfo question = {.gpu = 0};
        double begun = now_ns();
        put(agent, &question, SHP_MEMINFO, sizeof question, (uint32_t)round + 1);
        do {
            must(recv(agent, &answer, sizeof answer, 0) > 0, "no answer");
        } while (answer.header.type != SHP_MEMORY);
        samples[0][round] = now_ns() - begun;
    }
    double median = part(samples[0], rounds, 0.5);
    printf("{\"trip_ns\": %.1f, \"trip_p99_ns\": %.1f}\n", median, part(samples[0], rounds, 0.99));
}

int main(int argc, char **argv) {
    int rounds = argc > 3 ? atoi(argv[argc - 1]) : 0;
    int endless = argc == 5 && strcmp(argv[1], "pairs") == 0 && strcmp(argv[4], "0") == 0;
    int usable = rounds > 0 && rounds <= ROUNDS_MOST;
    if (usable && argc == 5 && strcmp(argv[1], "calls") == 0 && atoi(argv[3]) > 0 && atoi(argv[3]) <= COUNT_MOST)
        calls(strtoull(argv[2], NULL, 10), atoi(argv[3]), rounds);
    else if ((usable || endless) && argc == 5 && strcmp(argv[1], "pairs") == 0 && atoi(argv[3]) > 0 &&
             atoi(argv[3]) <= THREADS_MOST)
        pairs(strtoull(argv[2], NULL, 10), atoi(argv[3]), rounds);
    else if (usable && argc == 4 && strcmp(argv[1], "trip") == 0)
        trip(argv[2], rounds);
    else
        return fprintf(stderr,
                       "alloccost calls BYTES COUNT ROUNDS | pairs BYTES THREADS ROUNDS | trip SOCKET ROUNDS\n"),
               2;
    return 0;
}
