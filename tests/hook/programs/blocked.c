/* Programs whose streams are full or wait until the program's own next step. Each mode must end, as without the hook.
 *
 *     blocked crossed         a thread copies into a full stream behind a collective; another thread launches its peer
 *     blocked exited          the thread that launched into such a stream has exited
 *     blocked passed WAY      such a stream is destroyed, or another stream captures, while a third stream waits
 *     blocked destroyed COUNT so many destroyed streams wait for a value
 *     blocked nodes ROUNDS    launches behind a graph whose host node waits for the host
 *     blocked exit            a destructor launches behind a wait, and then ends the wait
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

/* FULL: operations that a stream can hold. LOOSE: launches behind the collective, fewer than the hook lets pass without
 * a fence (a window). */
enum { FULL = 1024, LOOSE = 10, WARM = 2000, OTHERS = 4, BEHIND = 500, WORDS = 4096 };

static CUcontext context;
static CUfunction noop, spin, meet;
static CUstream common;
static CUdeviceptr memory;
static _Atomic uint64_t arrived;
static _Atomic uint32_t words[WORDS];
static char page[64];
static bool launches_at_exit;

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

/* Launch one of two kernels that wait for each other. */
static void launch_rank(CUstream stream) {
    void *number = (void *)&arrived;
    uint64_t ranks = 2;
    void *arguments[] = {&number, &ranks};
    CHECK(cuLaunchKernel(meet, 1, 1, 1, 1, 1, 1, 0, stream, arguments, NULL));
}

static CUstream make(void) {
    CUstream stream;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    return stream;
}

static void wait_word(CUstream stream, _Atomic uint32_t *word) {
    CHECK(cuStreamWaitValue32_v2(stream, (CUdeviceptr)(uintptr_t)word, 1, CU_STREAM_WAIT_VALUE_GEQ));
}

static void begin(void) {
    CUmodule module;
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuModuleLoadData(&module, ""));
    CHECK(cuModuleGetFunction(&noop, module, "noop"));
    CHECK(cuModuleGetFunction(&spin, module, "spin_us_10"));
    CHECK(cuModuleGetFunction(&meet, module, "meet"));
    CHECK(cuMemAlloc_v2(&memory, sizeof page));
    common = make();
}

/* Launch LOOSE kernels without a fence behind them. The WARM launches before lengthen the hook's window, so that LOOSE
 * launches do not fill it. */
static void *launch_loosely(void *unused) {
    CHECK(cuCtxSetCurrent(context));
    for (int i = 0; i < WARM; i++)
        launch(noop, common);
    CHECK(cuStreamSynchronize(common));
    launch_rank(common);
    for (int i = 0; i < LOOSE; i++)
        launch(noop, common);
    return unused;
}

static void *copy(void *unused) {
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuMemcpyHtoDAsync_v2(memory, page, sizeof page, common));
    return unused;
}

static void *launch_twice(void *unused) {
    CHECK(cuCtxSetCurrent(context));
    CUstream stream = make();
    launch(noop, stream);
    usleep(400000);
    launch(noop, stream);
    return unused;
}

static void *launch_peer(void *unused) {
    CHECK(cuCtxSetCurrent(context));
    CUstream stream = make();
    usleep(300000);
    launch_rank(stream);
    CHECK(cuStreamSynchronize(stream));
    return unused;
}

/* Fill the common stream, which has the collective and LOOSE launches, with events. */
static void fill_up(void) {
    CUevent event;
    CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    for (int i = LOOSE + 1; i < FULL; i++)
        CHECK(cuEventRecord(event, common));
}

static void fill(bool exited) {
    pthread_t loose, peer, others[OTHERS];
    if (exited) {
        pthread_create(&loose, NULL, launch_loosely, NULL);
        pthread_join(loose, NULL);
    } else {
        launch_loosely(NULL);
    }
    fill_up();
    for (int i = 0; i < OTHERS; i++)
        pthread_create(&others[i], NULL, exited || i > 0 ? launch_twice : copy, NULL);
    pthread_create(&peer, NULL, launch_peer, NULL);
    pthread_join(peer, NULL);
    for (int i = 0; i < OTHERS; i++)
        pthread_join(others[i], NULL);
    CHECK(cuStreamSynchronize(common));
}

static void pass(bool captures) {
    CUstream waits = make(), captured = make(), stream = make();
    CUgraph graph;
    launch(noop, waits);
    wait_word(waits, &words[0]);
    launch_loosely(NULL);
    fill_up();
    if (captures) {
        CHECK(cuStreamBeginCapture_v2(captured, CU_STREAM_CAPTURE_MODE_RELAXED));
        CHECK(cuStreamEndCapture(captured, &graph));
    } else {
        CHECK(cuStreamDestroy_v2(common));
    }
    launch_rank(stream);
    atomic_store(&words[0], 1);
    CHECK(cuCtxSynchronize());
}

static void destroy(int count) {
    for (int i = 0; i < count; i++) {
        CUstream stream = make();
        wait_word(stream, &words[0]);
        launch(spin, stream);
        CHECK(cuStreamDestroy_v2(stream));
    }
    launch(spin, common);
    CHECK(cuStreamSynchronize(common));
    atomic_store(&words[0], 1);
    CHECK(cuCtxSynchronize());
}

static void CUDA_CB await_word(void *word) {
    while (atomic_load((_Atomic uint32_t *)word) == 0)
        usleep(100);
}

static void launch_nodes(int rounds) {
    CUstream captured = make();
    for (int i = 0; i < rounds; i++) {
        CUgraph graph;
        CUgraphExec executable;
        CHECK(cuStreamBeginCapture_v2(captured, CU_STREAM_CAPTURE_MODE_RELAXED));
        launch(spin, captured);
        CHECK(cuLaunchHostFunc(captured, await_word, &words[i]));
        CHECK(cuStreamEndCapture(captured, &graph));
        CHECK(cuGraphInstantiateWithFlags(&executable, graph, 0));
        CHECK(cuGraphLaunch(executable, common));
        for (int each = 0; each < BEHIND; each++)
            launch(spin, common);
        atomic_store(&words[i], 1);
        CHECK(cuStreamSynchronize(common));
    }
}

__attribute__((destructor)) static void launch_late(void) {
    if (!launches_at_exit)
        return;
    wait_word(common, &words[0]);
    launch(spin, common);
    atomic_store(&words[0], 1);
    CHECK(cuStreamSynchronize(common));
}

int main(int argc, char **argv) {
    if (argc < 2)
        return 2;
    begin();
    if (strcmp(argv[1], "crossed") == 0 || strcmp(argv[1], "exited") == 0)
        fill(argv[1][0] == 'e');
    else if (strcmp(argv[1], "passed") == 0)
        pass(strcmp(argv[2], "capture") == 0);
    else if (strcmp(argv[1], "destroyed") == 0)
        destroy(atoi(argv[2]));
    else if (strcmp(argv[1], "nodes") == 0)
        launch_nodes(atoi(argv[2]));
    launches_at_exit = strcmp(argv[1], "exit") == 0;
    return 0;
}
