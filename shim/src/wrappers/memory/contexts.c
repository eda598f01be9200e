/* Memory that contexts take beyond the bytes that calls request:
 *
 * - Overhead: device memory of the context itself, of a size that the agent has measured. It is charged once per
 *   process and GPU, from before the first context there until after the last one.
 * - Memory that cuCtxSetLimit makes a context reserve.
 *
 * Memory of modules is not charged; only the agent counts it, by the driver's byte counts.
 */
#include "wrappers/memory/contexts.h"

#include "driver/entries.h"
#include "memory/charge.h"
#include "memory/credits.h"
#include "memory/pools/pool_memory.h"
#include "memory/state.h"
#include "process/process.h"
#include "wrappers/memory/current_gpu.h"
#include "wrappers/memory/physical/virtual.h"
#include "wrappers/memory/refused.h"

/* Longest time, in ms, that the creation of the first context waits for WELCOME if the size of the overhead is unknown:
 * CONNECT_TIME_MS while HELLO is not sent, else WELCOME_TIME_MS, because WELCOME may take that long on busy processors.
 */
enum { CONNECT_TIME_MS = 200, WELCOME_TIME_MS = 2000 };

/* Before a context is created: charge the overhead if it is the first context on its GPU. Return false if the limit
 * does not allow it. */
static bool begin(int place) {
    if (place < 0)
        return true;
    uint64_t since = sys_now();
    struct session *session = memory_state()->session;
    struct gpu *gpu = &memory_state()->gpus->gpus[place];
    memory_lock();
    bool first = memory_state()->contexts[place]++ == 0;
    uint64_t bytes = gpu->context;
    memory_unlock();
    while (first && bytes == 0 && !atomic_load(&session->ready) &&
           sys_now() - since < (atomic_load(&session->greets) ? WELCOME_TIME_MS : CONNECT_TIME_MS) * SYS_MS)
        sys_wait(&session->ready, 0, 10 * SYS_MS);
    memory_lock();
    bytes = first ? gpu->context : 0;
    memory_unlock();
    if (bytes > 0 && !credits_reserve(place, bytes)) {
        memory_lock();
        memory_state()->contexts[place]--;
        memory_unlock();
        return false;
    }
    memory_lock();
    memory_state()->overhead[place] += bytes;
    memory_unlock();
    return true;
}

/* Decrement the number of contexts on a GPU. After the last one, return the charge of the overhead. */
static void overhead_context_gone(int place) {
    uint64_t bytes = 0;
    if (place < 0)
        return;
    memory_lock();
    if (--memory_state()->contexts[place] == 0) {
        bytes = memory_state()->overhead[place];
        memory_state()->overhead[place] = 0;
    }
    memory_unlock();
    credits_return(place, bytes);
    pool_current_changed();
}

void memory_forget_context(CUcontext context) {
    struct allocation *allocation;
    size_t at = 0;
    do {
        memory_lock();
        allocation = allocations_take_of(&memory_state()->allocations, context, &at);
        memory_unlock();
        if (allocation == NULL)
            return;
        enum allocation_kind kind = allocation->kind;
        uint64_t key = allocation->key;
        int place = allocation->place;
        uncharge_end(allocation, true);
        if (kind == ALLOCATION_CONTEXT)
            overhead_context_gone(place);
        else if (kind == ALLOCATION_ARRAY)
            virtual_array_gone((CUarray)key);
    } while (true);
}

/* After the driver's call: add a new context to the allocation table. If the call failed, or the context is in the
 * table already (a primary context that is retained again), undo the count of `begin`. */
static void end(int place, bool made, CUcontext context) {
    struct allocation_table *table = &memory_state()->allocations;
    bool counted = false;
    if (place >= 0 && made) {
        memory_lock();
        struct allocation *allocation = allocations_find(table, ALLOCATION_CONTEXT, (uintptr_t)context);
        if ((allocation == NULL || allocation->context != context) && (allocation = allocations_make(table)) != NULL) {
            allocation->kind = ALLOCATION_CONTEXT;
            allocation->key = (uintptr_t)context;
            allocation->context = context;
            allocation->place = (int8_t)place;
            allocations_add(table, allocation);
            counted = true;
        }
        memory_unlock();
    }
    if (!counted)
        overhead_context_gone(place);
}

#define CREATE(symbol, context, device, ...)                                        \
    CUresult result = process_enter();                                              \
    if (result != CUDA_SUCCESS)                                                     \
        return result;                                                              \
    if (ENTRY_##symbol != ENTRY_cuDevicePrimaryCtxRetain)                           \
        atomic_store(&the_process->gate.contexts, CONTEXTS_SEVERAL);                \
    int place = gpus_place(memory_state()->gpus, device);                           \
    if (!begin(place))                                                              \
        return REFUSED(CUDA_ERROR_OUT_OF_MEMORY, context);                          \
    result = HAS(symbol) ? DRIVER(symbol)(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND;      \
    end(place, result == CUDA_SUCCESS, result == CUDA_SUCCESS ? *context : NULL);   \
    if (result == CUDA_SUCCESS)                                                     \
        streams_born(&the_process->streams, *context);                              \
    if (ENTRY_##symbol == ENTRY_cuDevicePrimaryCtxRetain && result == CUDA_SUCCESS) \
        streams_retained(&the_process->streams, device, *context);                  \
    return result

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CREATE(cuDevicePrimaryCtxRetain, context, device, context, device);
}

EXPORT CUresult cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice device) {
    CREATE(cuCtxCreate, context, device, context, flags, device);
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device) {
    CREATE(cuCtxCreate_v2, context, device, context, flags, device);
}

EXPORT CUresult cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *parameters, int count, unsigned int flags,
                               CUdevice device) {
    CREATE(cuCtxCreate_v3, context, device, context, parameters, count, flags, device);
}

EXPORT CUresult cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *parameters, unsigned int flags, CUdevice device) {
    CREATE(cuCtxCreate_v4, context, device, context, parameters, flags, device);
}

EXPORT CUresult cuGLCtxCreate(CUcontext *context, unsigned int flags, CUdevice device) {
    CREATE(cuGLCtxCreate, context, device, context, flags, device);
}

EXPORT CUresult cuGLCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device) {
    CREATE(cuGLCtxCreate_v2, context, device, context, flags, device);
}

EXPORT CUresult cuVDPAUCtxCreate(CUcontext *context, unsigned int flags, CUdevice device, unsigned int vdpau_device,
                                 void *vdpau_functions) {
    CREATE(cuVDPAUCtxCreate, context, device, context, flags, device, vdpau_device, vdpau_functions);
}

EXPORT CUresult cuVDPAUCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device, unsigned int vdpau_device,
                                    void *vdpau_functions) {
    CREATE(cuVDPAUCtxCreate_v2, context, device, context, flags, device, vdpau_device, vdpau_functions);
}

EXPORT CUresult cuGreenCtxCreate(CUgreenCtx *green, CUdevResourceDesc resources, CUdevice device, unsigned int flags) {
    CUcontext context = NULL;
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS)
        return result;
    atomic_store(&the_process->gate.contexts, CONTEXTS_SEVERAL);
    int place = gpus_place(memory_state()->gpus, device);
    if (!begin(place))
        return REFUSED(CUDA_ERROR_OUT_OF_MEMORY, green);
    result = HAS(cuGreenCtxCreate) ? DRIVER(cuGreenCtxCreate)(green, resources, device, flags) : CUDA_ERROR_NOT_FOUND;
    bool known =
        result == CUDA_SUCCESS && HAS(cuCtxFromGreenCtx) && DRIVER(cuCtxFromGreenCtx)(&context, *green) == CUDA_SUCCESS;
    end(place, known, context);
    if (known)
        streams_born(&the_process->streams, context);
    return result;
}

/* Bytes, 64 TiB: no GPU has as much, so no driver reserves more. */
#define MOST_SET_ASIDE (1ull << 46)

/* Return the bytes that a context reserves for a limit with this value. */
static uint64_t set_aside(CUlimit limit, uint64_t value) {
    CUdevice device;
    int processors = 0, threads = 0;
    if (limit != CU_LIMIT_STACK_SIZE)
        return value;
    if (!HAS(cuDeviceGetAttribute) || DRIVER(cuCtxGetDevice)(&device) != CUDA_SUCCESS ||
        DRIVER(cuDeviceGetAttribute)(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device) != CUDA_SUCCESS ||
        DRIVER(cuDeviceGetAttribute)(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, device) !=
            CUDA_SUCCESS)
        return 0;
    uint64_t most = (uint64_t)processors * (uint64_t)threads;
    return most != 0 && value > UINT64_MAX / 2 / most ? UINT64_MAX / 2 : value * most;
}

/* Set a limit of the current context (cuCtxSetLimit), and charge the memory that the context reserves for it beyond the
 * default. With limit_lock, because no other thread may change the limit between the reading, the charge and the
 * setting. */
static CUresult set_limit(CUlimit limit, size_t value) {
    CUcontext context;
    int place;
    size_t before, after;
    struct charge charge = {NULL};
    CUresult result = current_gpu(&context, &place);
    if (result != CUDA_SUCCESS || place < 0 || !HAS(cuCtxGetLimit) ||
        DRIVER(cuCtxGetLimit)(&before, limit) != CUDA_SUCCESS)
        return DRIVER(cuCtxSetLimit)(limit, value);
    uint64_t key = (uintptr_t)context ^ (uint64_t)limit << 48;
    struct allocation *held = uncharge_begin(ALLOCATION_LIMIT, key);
    uint64_t held_bytes = held ? held->bytes : 0, base = held ? held->mark : set_aside(limit, before);
    uint64_t wanted = set_aside(limit, value), bytes = wanted > base ? wanted - base : 0;
    if (wanted > MOST_SET_ASIDE) { /* larger than any GPU: let the driver report the error */
        result = DRIVER(cuCtxSetLimit)(limit, value);
        if (result == CUDA_SUCCESS)
            DRIVER(cuCtxSetLimit)(limit, before);
        uncharge_end(held, false);
        return result == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : result;
    }
    result = charge_begin(&charge, context, place, bytes > held_bytes ? bytes - held_bytes : 0);
    if (result == CUDA_SUCCESS)
        result = DRIVER(cuCtxSetLimit)(limit, value);
    if (result != CUDA_SUCCESS) {
        charge_end(&charge, false, ALLOCATION_LIMIT, key);
        uncharge_end(held, false);
        return result;
    }
    struct allocation *now = charge.allocation; /* from here on it has the charges of both */
    uint64_t sum = held_bytes + now->bytes;
    if (DRIVER(cuCtxGetLimit)(&after, limit) == CUDA_SUCCESS) {
        wanted = set_aside(limit, after);
        bytes = wanted > base ? wanted - base : 0;
    }
    if (bytes > sum)
        credits_grow(place, bytes - sum);
    else
        credits_return(place, sum - bytes);
    now->bytes = bytes;
    now->mark = base;
    charge_end(&charge, true, ALLOCATION_LIMIT, key);
    if (held != NULL) {
        memory_lock();
        allocations_drop(&memory_state()->allocations, held);
        memory_unlock();
    }
    return result;
}

EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || !HAS(cuCtxSetLimit))
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    if (limit != CU_LIMIT_STACK_SIZE && limit != CU_LIMIT_PRINTF_FIFO_SIZE && limit != CU_LIMIT_MALLOC_HEAP_SIZE)
        return DRIVER(cuCtxSetLimit)(limit, value);
    lock(&memory_state()->limit_lock);
    result = set_limit(limit, value);
    unlock(&memory_state()->limit_lock);
    return result;
}
