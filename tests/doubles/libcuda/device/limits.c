/* Device memory that a context itself takes, and cuCtxSetLimit, which changes its amount.
 *
 * The first context of a process on a device takes the bytes in the state file. They are freed with the process's last
 * context there. A printf FIFO larger than 1 MiB and a heap larger than 8 MiB take the bytes above these sizes. A stack
 * larger than 1 KiB takes the bytes above that for each thread that the device can hold. Stack sizes are rounded up to
 * STACK_STEP bytes.
 */
#include "device/limits.h"

enum { STACK_STEP = 16 };

static unsigned contexts_on[FAKE_DEVICES];

static uint64_t first_value(CUlimit limit) {
    switch (limit) {
    case CU_LIMIT_STACK_SIZE: return 1024;
    case CU_LIMIT_PRINTF_FIFO_SIZE: return 1 << 20;
    case CU_LIMIT_MALLOC_HEAP_SIZE: return 8 << 20;
    case CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH: return 2;
    case CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT: return 2048;
    case CU_LIMIT_MAX_L2_FETCH_GRANULARITY: return 64;
    default: return 0;
    }
}

static uint64_t cost(CUlimit limit, uint64_t value) {
    uint64_t first = first_value(limit), more = value > first ? value - first : 0;
    if (limit == CU_LIMIT_STACK_SIZE)
        return more * FAKE_PROCESSORS * FAKE_THREADS_PER_PROCESSOR;
    return limit == CU_LIMIT_PRINTF_FIFO_SIZE || limit == CU_LIMIT_MALLOC_HEAP_SIZE ? more : 0;
}

bool fake_context_charge(struct context *context) {
    if (contexts_on[context->device] == 0 &&
        !fake_state_take(context->device, FAKE_CONTEXT, fake_state_context_bytes()))
        return false;
    contexts_on[context->device]++;
    for (int limit = 0; limit < CU_LIMIT_MAX; limit++)
        context->limits[limit] = first_value((CUlimit)limit);
    return true;
}

void fake_context_release(struct context *context) {
    fake_state_give(context->device, FAKE_CONTEXT, context->charged);
    if (--contexts_on[context->device] == 0)
        fake_state_give(context->device, FAKE_CONTEXT, fake_state_context_bytes());
}

void fake_contexts_forgotten(void) {
    for (int device = 0; device < FAKE_DEVICES; device++)
        contexts_on[device] = 0;
}

EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (limit >= CU_LIMIT_MAX)
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    if (value > UINT32_MAX * (uint64_t)4096)
        return CUDA_ERROR_INVALID_VALUE;
    if (limit == CU_LIMIT_STACK_SIZE)
        value = (value + STACK_STEP - 1) / STACK_STEP * STACK_STEP;
    pthread_mutex_lock(&fake_lock);
    uint64_t before = cost(limit, context->limits[limit]), after = cost(limit, value);
    if (after > before && !fake_state_take(context->device, FAKE_CONTEXT, after - before))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    else {
        if (after < before)
            fake_state_give(context->device, FAKE_CONTEXT, before - after);
        context->charged += after - before;
        context->limits[limit] = value;
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (limit >= CU_LIMIT_MAX)
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    if (value == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *value = context->limits[limit];
    return CUDA_SUCCESS;
}
