/* Initialization and contexts of the double. A child of fork whose parent used CUDA gets
 * CUDA_ERROR_NOT_INITIALIZED. */
#include <stdlib.h>
#include <string.h>

#include "memory/array.h"
#include "device/limits.h"
#include "memory/memory.h"
#include "work/module.h"
#include "memory/pool.h"
#include "memory/sharing.h"

enum { STACK_DEPTH = 16 };

static bool initialized, forked, ended;
static struct context *contexts;
static uint64_t ids; /* number of contexts created so far */
static struct context primary[FAKE_DEVICES];
static __thread struct context *stack[STACK_DEPTH];
static __thread int depth;
__thread bool fake_per_thread;

static void in_child(void) {
    fake_engine_forked();
    if (initialized) {
        forked = true;
        fake_state_detach();
    }
    initialized = false;
    fake_contexts_forgotten();
    depth = 0;
}

EXPORT CUresult cuInit(unsigned int flags) {
    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    CUresult result = forked ? CUDA_ERROR_NOT_INITIALIZED : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS && !initialized) {
        if (!fake_state_attach()) {
            result = CUDA_ERROR_SYSTEM_NOT_READY;
        } else if (fake_state_visible(0) < 0) {
            result = CUDA_ERROR_NO_DEVICE;
        } else {
            pthread_atfork(NULL, NULL, in_child);
            initialized = true;
        }
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

/* Sleep for the milliseconds in an environment variable. FAKE_CUDA_END_MS: duration of the end of a context or of the
 * library, after its work has ended. FAKE_CUDA_RELEASE_MS: duration of a release of a primary context that does not end
 * it. */
void fake_take_time(const char *variable) {
    const char *ms = getenv(variable);
    if (initialized && ms != NULL)
        fake_sleep_until(fake_now() + strtoull(ms, NULL, 10) * 1000000);
}

void fake_misused(void) {
    if (initialized)
        fake_state_usage(0)->misused++;
}

/* Runs when the program exits or the library is unloaded: later calls return CUDA_ERROR_DEINITIALIZED. */
__attribute__((destructor)) static void end_library(void) {
    ended = true;
    fake_take_time("FAKE_CUDA_END_MS");
}

CUresult fake_initialized(void) {
    if (ended) {
        fake_misused();
        return CUDA_ERROR_DEINITIALIZED;
    }
    return initialized ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult fake_enter(struct context **context) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    *context = depth > 0 ? stack[depth - 1] : NULL;
    if (*context == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    return (*context)->alive && !(*context)->ending ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

CUresult fake_fault(void) {
    const struct context *context = initialized && depth > 0 ? stack[depth - 1] : NULL;
    uint64_t at = context != NULL && context->alive ? context->faults_at : 0;
    return at != 0 && fake_now() >= at ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS;
}

CUresult fake_found(CUresult result) {
    CUresult fault = result == CUDA_SUCCESS ? fake_fault() : CUDA_SUCCESS;
    return fault != CUDA_SUCCESS ? fault : result;
}

bool fake_is(const void *handle, unsigned magic) {
    return handle != NULL && (uintptr_t)handle > 4096 && *(const unsigned *)handle == magic;
}

void fake_add_stream(struct context *context, struct stream *stream) {
    stream->magic = MAGIC_STREAM;
    stream->context = context;
    stream->next = context->streams;
    context->streams = stream;
}

static CUresult init_context(struct context *context, int device, unsigned flags) {
    memset(context, 0, sizeof *context);
    context->device = device;
    context->id = ++ids;
    if (!fake_context_charge(context))
        return CUDA_ERROR_OUT_OF_MEMORY;
    context->magic = MAGIC_CONTEXT;
    context->flags = flags;
    context->alive = true;
    context->legacy = (struct stream){.magic = MAGIC_STREAM, .context = context};
    context->marks = (struct stream){.context = context, .flags = 0};
    context->next = contexts;
    contexts = context;
    return CUDA_SUCCESS;
}

static CUresult new_context(struct context **out, int device, unsigned flags) {
    struct context *context = malloc(sizeof *context);
    CUresult result = init_context(context, device, flags);
    if (result == CUDA_SUCCESS) {
        context->references = 1;
        *out = context;
    } else {
        free(context);
    }
    return result;
}

static void end_context(struct context *context) {
    context->ending = true;
    fake_wait_context(context);
    fake_settle(context->device);
    for (struct stream *stream = context->streams; stream != NULL; stream = stream->next)
        stream->magic = MAGIC_DEAD;
    fake_events_of_context_gone(context);
    fake_capture_context_gone(context);
    fake_modules_of_context_gone(context);
    fake_arrays_of_context_gone(context);
    fake_sharing_of_context_gone(context);
    fake_memory_of_context_gone(context);
    fake_context_release(context);
    context->alive = context->ending = false;
    for (struct context **at = &contexts; *at != NULL; at = &(*at)->next)
        if (*at == context) {
            *at = context->next;
            break;
        }
}

/* Return the default stream of this thread in the context, created if necessary. The stream outlives the thread. */
static struct stream *own_default(struct context *context) {
    static uint64_t threads;
    static __thread uint64_t thread;
    pthread_mutex_lock(&fake_lock);
    thread = thread != 0 ? thread : ++threads;
    struct stream *stream = context->per_thread;
    while (stream != NULL && stream->thread != thread)
        stream = stream->next;
    if (stream == NULL) {
        stream = calloc(1, sizeof *stream);
        *stream =
            (struct stream){.magic = MAGIC_STREAM, .context = context, .thread = thread, .next = context->per_thread};
        context->per_thread = stream;
    }
    pthread_mutex_unlock(&fake_lock);
    return stream;
}

CUresult fake_enter_stream(CUstream handle, struct stream **stream) {
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (handle == NULL)
        handle = fake_per_thread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
    if (handle == CU_STREAM_LEGACY)
        *stream = &context->legacy;
    else if (handle == CU_STREAM_PER_THREAD)
        *stream = own_default(context);
    else
        *stream = fake_is(handle, MAGIC_STREAM) ? (struct stream *)handle : NULL;
    if (*stream == NULL && fake_is(handle, MAGIC_DEAD))
        fake_misused();
    return *stream == NULL ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *out, unsigned int flags, CUdevice ordinal) {
    int device;
    struct context *context;
    pthread_mutex_lock(&fake_lock);
    CUresult result = fake_find_device(ordinal, &device);
    if (result == CUDA_SUCCESS && out == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        result = depth < STACK_DEPTH ? fake_unsafe_call() : CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS)
        result = new_context(&context, device, flags);
    if (result == CUDA_SUCCESS) {
        stack[depth++] = context;
        *out = (CUcontext)context;
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuCtxCreate_v4(CUcontext *out, CUctxCreateParams *params, unsigned int flags, CUdevice ordinal) {
    (void)params;
    return cuCtxCreate_v2(out, flags, ordinal);
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext handle) {
    struct context *context = (struct context *)handle;
    if (!initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!fake_is(context, MAGIC_CONTEXT) || !context->alive)
        return CUDA_ERROR_INVALID_CONTEXT;
    fake_moment(MOMENT_ENDING);
    pthread_mutex_lock(&fake_lock);
    end_context(context);
    if (depth > 0 && stack[depth - 1] == context)
        depth--;
    pthread_mutex_unlock(&fake_lock);
    fake_take_time("FAKE_CUDA_END_MS");
    fake_moment(MOMENT_ENDED);
    return CUDA_SUCCESS;
}

/* In the double a green context is a context that is not made current when it is created. Its part of the device is not
 * simulated. */
EXPORT CUresult cuGreenCtxCreate(CUgreenCtx *out, CUdevResourceDesc resources, CUdevice ordinal, unsigned int flags) {
    int device;
    pthread_mutex_lock(&fake_lock);
    CUresult result = fake_find_device(ordinal, &device);
    if (result == CUDA_SUCCESS && (out == NULL || resources == NULL || !(flags & CU_GREEN_CTX_DEFAULT_STREAM)))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        result = fake_unsafe_call();
    if (result == CUDA_SUCCESS)
        result = new_context((struct context **)out, device, 0);
    if (result == CUDA_SUCCESS)
        ((struct context *)*out)->green = true;
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuGreenCtxDestroy(CUgreenCtx handle) {
    return cuCtxDestroy_v2((CUcontext)handle);
}

EXPORT CUresult cuCtxFromGreenCtx(CUcontext *out, CUgreenCtx handle) {
    if (!fake_is(handle, MAGIC_CONTEXT))
        return CUDA_ERROR_INVALID_CONTEXT;
    *out = (CUcontext)handle;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetDevResource(CUdevice ordinal, CUdevResource *out, CUdevResourceType type) {
    int device;
    CUresult result = fake_find_device(ordinal, &device);
    if (result == CUDA_SUCCESS && (out == NULL || type != CU_DEV_RESOURCE_TYPE_SM))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *out = (CUdevResource){.type = type, .sm.smCount = FAKE_PROCESSORS};
    return result;
}

EXPORT CUresult cuDevResourceGenerateDesc(CUdevResourceDesc *out, CUdevResource *resources, unsigned int count) {
    static char whole;
    if (out == NULL || resources == NULL || count == 0)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (CUdevResourceDesc)&whole;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxAttach(CUcontext *out, unsigned int flags) {
    struct context *context;
    CUresult result = flags == 0 && out != NULL ? fake_enter(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    context->references++;
    pthread_mutex_unlock(&fake_lock);
    *out = (CUcontext)context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxDetach(CUcontext handle) {
    struct context *current;
    CUresult result = fake_enter(&current);
    if (result == CUDA_SUCCESS && (struct context *)handle != current)
        result = CUDA_ERROR_INVALID_CONTEXT;
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    bool last = --current->references == 0;
    pthread_mutex_unlock(&fake_lock);
    return last ? cuCtxDestroy_v2(handle) : CUDA_SUCCESS;
}

CUcontext fake_primary(int device) {
    return (CUcontext)&primary[device];
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice ordinal) {
    int device;
    pthread_mutex_lock(&fake_lock);
    CUresult result = fake_find_device(ordinal, &device);
    if (result == CUDA_SUCCESS && out == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        while (primary[device].ending) {
            pthread_mutex_unlock(&fake_lock);
            fake_sleep_until(fake_now() + 1000000);
            pthread_mutex_lock(&fake_lock);
        }
        if (!primary[device].alive)
            result = init_context(&primary[device], device, primary[device].flags);
        if (result == CUDA_SUCCESS) {
            primary[device].references++;
            *out = (CUcontext)&primary[device];
        }
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

static CUresult release_primary(CUdevice ordinal, bool reset) {
    int device;
    bool ends = false;
    fake_moment(MOMENT_ENDING);
    pthread_mutex_lock(&fake_lock);
    CUresult result = fake_find_device(ordinal, &device);
    if (result == CUDA_SUCCESS && (!primary[device].alive || primary[device].references == 0))
        result = reset ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    else if (result == CUDA_SUCCESS && (ends = reset || --primary[device].references == 0))
        end_context(&primary[device]);
    pthread_mutex_unlock(&fake_lock);
    fake_take_time(ends ? "FAKE_CUDA_END_MS" : "FAKE_CUDA_RELEASE_MS");
    if (ends)
        fake_moment(MOMENT_ENDED);
    return result;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice ordinal) {
    return release_primary(ordinal, false);
}

EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice ordinal) {
    return release_primary(ordinal, false);
}

EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice ordinal) {
    return release_primary(ordinal, true);
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned int *flags, int *active) {
    if (flags == NULL || active == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    int device;
    CUresult result = fake_find_device(ordinal, &device);
    if (result == CUDA_SUCCESS) {
        *flags = primary[device].flags;
        *active = primary[device].alive;
    }
    return result;
}

EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice ordinal, unsigned int flags) {
    int device;
    CUresult result = fake_find_device(ordinal, &device);
    if (result == CUDA_SUCCESS)
        primary[device].flags = flags;
    return result;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    if (fake_is(context, MAGIC_CONTEXT) && !((struct context *)context)->alive)
        fake_misused();
    if (!fake_is(context, MAGIC_CONTEXT) || depth == STACK_DEPTH)
        return CUDA_ERROR_INVALID_CONTEXT;
    stack[depth++] = (struct context *)context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    if (!initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (context != NULL)
        *context = (CUcontext)stack[depth];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
    if (!initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (context != NULL && !fake_is(context, MAGIC_CONTEXT))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (depth == 0 && context != NULL)
        depth = 1;
    if (depth > 0)
        stack[depth - 1] = (struct context *)context;
    if (depth == 1 && context == NULL)
        depth = 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
    if (context == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (!initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    *context = depth > 0 ? (CUcontext)stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *ordinal) {
    if (ordinal == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    *ordinal = fake_ordinal_of(context->device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetId(CUcontext handle, unsigned long long *id) {
    if (id == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    struct context *context = (struct context *)handle;
    CUresult result = handle == NULL ? fake_enter(&context) : fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    if (!fake_is(context, MAGIC_CONTEXT) || !context->alive) {
        fake_misused();
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
    *id = context->id;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetApiVersion(CUcontext context, unsigned int *version) {
    if (version == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    (void)context;
    *version = FAKE_CUDA_VERSION;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSynchronize(void) {
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    result = fake_sync_call(context);
    if (result == CUDA_SUCCESS) {
        fake_wait_context(context);
        fake_pools_waited(context->device);
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}
