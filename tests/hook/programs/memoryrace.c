/* Threads that take device memory in every way, and free memory that other threads took, at the limit. Prints one JSON
 * object.
 *
 * memoryrace SEED THREADS CALLS [KIND]: each thread makes CALLS steps. The process forks during the race; its children
 * use none of its memory. The object has the number of calls that took memory (`taken`), were refused for lack of
 * memory (`refused`), or failed otherwise (`failed`). `held` is the number of bytes that the program holds at the end,
 * by its own count, before it frees them.
 */
#include <cuda.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum kind { NOTHING, LINEAR, MANAGED, PITCHED, ARRAY, POOL, OWN_POOL, PHYSICAL, MAPPED, GRAPH, KINDS };
enum { SLOTS = 48, THREADS_MOST = 32, PAGE = 2 << 20, FORK_EVERY = 97 };

/* Memory that is held. The thread that swaps `kind` out of the slot owns the memory. */
struct slot {
    _Atomic int kind; /* -1: a thread is filling or emptying the slot */
    CUdeviceptr address;
    size_t bytes;
    void *handle;
    CUmemGenericAllocationHandle memory;
};

static struct slot slots[SLOTS];
static CUcontext contexts[2];
static CUmemoryPool own;
static _Atomic long taken, refused, failed;
static unsigned seed, calls;
static int only;

static CUresult take_mapped(struct slot *slot, size_t bytes) {
    CUmemAllocationProp how = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                               .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUresult result = cuMemCreate(&slot->memory, bytes, &how, 0);
    if (result != CUDA_SUCCESS)
        return result;
    if (cuMemAddressReserve(&slot->address, bytes, 0, 0, 0) != CUDA_SUCCESS ||
        cuMemMap(slot->address, bytes, 0, slot->memory, 0) != CUDA_SUCCESS ||
        cuMemRelease(slot->memory) != CUDA_SUCCESS)
        return CUDA_ERROR_UNKNOWN;
    return CUDA_SUCCESS;
}

/* Take memory by a graph with two allocations, of which the first is freed before the second. */
static CUresult take_graph(struct slot *slot, size_t bytes) {
    CUgraph graph;
    CUgraphNode node;
    CUDA_MEM_ALLOC_NODE_PARAMS parameters = {
        .poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}},
        .bytesize = bytes};
    if (cuGraphCreate(&graph, 0) != CUDA_SUCCESS ||
        cuGraphAddMemAllocNode(&node, graph, NULL, 0, &parameters) != CUDA_SUCCESS ||
        cuGraphAddMemFreeNode(&node, graph, &node, 1, parameters.dptr) != CUDA_SUCCESS ||
        cuGraphAddMemAllocNode(&node, graph, &node, 1, &parameters) != CUDA_SUCCESS ||
        cuGraphInstantiateWithFlags((CUgraphExec *)&slot->handle, graph, 0) != CUDA_SUCCESS ||
        cuGraphDestroy(graph) != CUDA_SUCCESS)
        return CUDA_ERROR_UNKNOWN;
    CUresult result = cuGraphUpload(slot->handle, NULL);
    if (result != CUDA_SUCCESS && cuGraphExecDestroy(slot->handle) != CUDA_SUCCESS)
        return CUDA_ERROR_UNKNOWN;
    return result;
}

static CUresult take(struct slot *slot, int kind, size_t bytes) {
    CUmemAllocationProp how = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                               .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUDA_ARRAY3D_DESCRIPTOR box = {
        .Width = 1024, .Height = bytes >> 14, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4};
    size_t pitch;
    slot->bytes = bytes;
    switch (kind) {
    case LINEAR: return cuMemAlloc_v2(&slot->address, bytes);
    case MANAGED: return cuMemAllocManaged(&slot->address, bytes, CU_MEM_ATTACH_GLOBAL);
    case PITCHED: return cuMemAllocPitch_v2(&slot->address, &pitch, 1 << 12, bytes >> 12, 4);
    case ARRAY: return cuArray3DCreate_v2((CUarray *)&slot->handle, &box);
    case POOL: return cuMemAllocAsync(&slot->address, bytes, NULL);
    case OWN_POOL: return cuMemAllocFromPoolAsync(&slot->address, bytes, own, NULL);
    case PHYSICAL: return cuMemCreate(&slot->memory, bytes, &how, 0);
    case MAPPED: return take_mapped(slot, bytes);
    default: return take_graph(slot, bytes);
    }
}

static CUresult give(struct slot *slot, int kind, bool on_stream) {
    switch (kind) {
    case LINEAR: return on_stream ? cuMemFreeAsync(slot->address, NULL) : cuMemFree_v2(slot->address);
    case MANAGED:
    case PITCHED: return cuMemFree_v2(slot->address);
    case ARRAY: return cuArrayDestroy(slot->handle);
    case POOL:
    case OWN_POOL: return on_stream ? cuMemFreeAsync(slot->address, NULL) : cuMemFree_v2(slot->address);
    case PHYSICAL: return cuMemRelease(slot->memory);
    case MAPPED:
        return cuMemUnmap(slot->address, slot->bytes) == CUDA_SUCCESS ? cuMemAddressFree(slot->address, slot->bytes)
                                                                      : CUDA_ERROR_UNKNOWN;
    default: return cuGraphExecDestroy(slot->handle);
    }
}

static void count(CUresult result) {
    atomic_fetch_add(result == CUDA_SUCCESS ? &taken : result == CUDA_ERROR_OUT_OF_MEMORY ? &refused : &failed, 1);
}

static void step(unsigned *random) {
    struct slot *slot = &slots[rand_r(random) % SLOTS];
    int kind = atomic_exchange(&slot->kind, -1);
    if (kind < 0)
        return;
    if (kind == NOTHING) {
        kind = only ? only : 1 + (int)(rand_r(random) % (KINDS - 1));
        CUresult result = take(slot, kind, (size_t)(1 + rand_r(random) % 12) * PAGE);
        count(result);
        atomic_store(&slot->kind, result == CUDA_SUCCESS ? kind : NOTHING);
        return;
    }
    CUresult result = give(slot, kind, rand_r(random) % 2);
    if (result != CUDA_SUCCESS) {
        fprintf(stderr, "memoryrace: %d of kind %d was not given back: %d\n", (int)(slot - slots), kind, result);
        atomic_fetch_add(&failed, 1);
    }
    atomic_store(&slot->kind, NOTHING);
}

static void *race(void *number) {
    unsigned random = seed * 1000003u + (unsigned)(size_t)number;
    for (unsigned call = 0; call < calls; call++) {
        cuCtxSetCurrent(contexts[rand_r(&random) % 2]);
        step(&random);
        if (call % FORK_EVERY == FORK_EVERY - 1) {
            cuCtxSynchronize();
            cuDeviceGraphMemTrim(0);
        }
    }
    return NULL;
}

/* Fork during the race. The child must not wait for a lock that a thread of its parent held, and has no memory of its
 * parent. (ThreadSanitizer does not support a thread in such a child.) */
static void fork_meanwhile(void) {
#ifndef __SANITIZE_THREAD__
    int status;
    pid_t child = fork();
    if (child == 0) {
        CUdeviceptr address;
        _exit(cuMemAlloc_v2(&address, PAGE) == CUDA_SUCCESS);
    }
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0)
        atomic_fetch_add(&failed, 1);
#endif
}

int main(int count_of_arguments, char **arguments) {
    pthread_t threads[THREADS_MOST];
    CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    long held = 0;
    if (count_of_arguments < 4)
        return 2;
    only = count_of_arguments > 4 ? atoi(arguments[4]) : 0;
    seed = (unsigned)atoi(arguments[1]);
    calls = (unsigned)atoi(arguments[3]);
    int many = atoi(arguments[2]) < THREADS_MOST ? atoi(arguments[2]) : THREADS_MOST;
    if (cuInit(0) != CUDA_SUCCESS || cuDevicePrimaryCtxRetain(&contexts[0], 0) != CUDA_SUCCESS ||
        cuCtxCreate_v2(&contexts[1], 0, 0) != CUDA_SUCCESS || cuMemPoolCreate(&own, &properties) != CUDA_SUCCESS)
        return 1;
    for (int i = 0; i < many; i++)
        pthread_create(&threads[i], NULL, race, (void *)(size_t)i);
    for (int i = 0; i < 8; i++) {
        usleep(20000);
        fork_meanwhile();
    }
    for (int i = 0; i < many; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < SLOTS; i++)
        if (slots[i].kind != NOTHING) {
            held += (long)slots[i].bytes;
            if (give(&slots[i], slots[i].kind, false) != CUDA_SUCCESS)
                failed++;
        }
    cuCtxSynchronize();
    cuDeviceGraphMemTrim(0);
    if (cuMemPoolDestroy(own) != CUDA_SUCCESS)
        failed++;
    printf("{\"taken\": %ld, \"refused\": %ld, \"failed\": %ld, \"held\": %ld}\n", taken, refused, failed, held);
    fflush(stdout);
    getchar(); /* the test reads ledger and driver now */
    return 0;
}
