/* Initialization, devices and contexts of the double. A child of fork whose parent used CUDA gets
 * CUDA_ERROR_NOT_INITIALIZED. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake.h"

enum { STACK_DEPTH = 16 };

static bool initialized, forked;
static struct context *contexts;
static struct context primary[FAKE_DEVICES];
static __thread struct context *stack[STACK_DEPTH];
static __thread int depth;

static void in_child(void) {
    fake_engine_forked();
    if (initialized) {
        forked = true;
        fake_state_detach();
    }
    initialized = false;
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

CUresult fake_initialized(void) {
    return initialized ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult fake_enter(struct context **context) {
    if (!initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    *context = depth > 0 ? stack[depth - 1] : NULL;
    if (*context == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    return (*context)->alive ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

bool fake_is(const void *handle, unsigned magic) {
    return handle != NULL && (uintptr_t)handle > 4096 && *(const unsigned *)handle == magic;
}

EXPORT CUresult cuDriverGetVersion(int *version) {
    *version = FAKE_CUDA_VERSION;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count) {
    if (!initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    for (*count = 0; fake_state_visible(*count) >= 0; ++*count)
        ;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (!initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (fake_state_visible(ordinal) < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

static CUresult find_device(CUdevice ordinal, int *device) {
    if (!initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    *device = fake_state_visible(ordinal);
    return *device < 0 ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice ordinal) {
    int device;
    CUresult result = find_device(ordinal, &device);
    if (result == CUDA_SUCCESS)
        snprintf(name, (size_t)length, "%s", fake_state_device(device)->model);
    return result;
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice ordinal) {
    int device;
    CUresult result = find_device(ordinal, &device);
    if (result == CUDA_SUCCESS)
        memcpy(uuid->bytes, fake_state_device(device)->uuid, sizeof uuid->bytes);
    return result;
}

EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice ordinal) {
    return cuDeviceGetUuid_v2(uuid, ordinal);
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice ordinal) {
    int device;
    CUresult result = find_device(ordinal, &device);
    if (result == CUDA_SUCCESS)
        *bytes = fake_state_device(device)->memory;
    return result;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice ordinal) {
    int device;
    CUresult result = find_device(ordinal, &device);
    if (result != CUDA_SUCCESS)
        return result;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: *value = 1; break;
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

void fake_add_stream(struct context *context, struct stream *stream) {
    stream->magic = MAGIC_STREAM;
    stream->context = context;
    stream->next = context->streams;
    context->streams = stream;
}

static void init_context(struct context *context, int device, unsigned flags) {
    memset(context, 0, sizeof *context);
    context->magic = MAGIC_CONTEXT;
    context->device = device;
    context->flags = flags;
    context->alive = true;
    context->legacy = (struct stream){.magic = MAGIC_STREAM, .context = context};
    context->per_thread = (struct stream){.magic = MAGIC_STREAM, .context = context};
    context->next = contexts;
    contexts = context;
}

static void end_context(struct context *context) {
    fake_wait_context(context);
    fake_capture_context_gone(context);
    context->alive = false;
    for (struct context **at = &contexts; *at != NULL; at = &(*at)->next)
        if (*at == context) {
            *at = context->next;
            break;
        }
}

struct stream *fake_stream(struct context *context, CUstream handle, bool per_thread) {
    if (handle == NULL)
        handle = per_thread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
    if (handle == CU_STREAM_LEGACY)
        return &context->legacy;
    if (handle == CU_STREAM_PER_THREAD)
        return &context->per_thread;
    return fake_is(handle, MAGIC_STREAM) ? (struct stream *)handle : NULL;
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *out, unsigned int flags, CUdevice ordinal) {
    int device;
    pthread_mutex_lock(&fake_lock);
    CUresult result = find_device(ordinal, &device);
    if (result == CUDA_SUCCESS)
        result = depth < STACK_DEPTH ? fake_unsafe_call() : CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS) {
        struct context *context = malloc(sizeof *context);
        init_context(context, device, flags);
        context->references = 1;
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
    pthread_mutex_lock(&fake_lock);
    end_context(context);
    if (depth > 0 && stack[depth - 1] == context)
        depth--;
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxAttach(CUcontext *out, unsigned int flags) {
    struct context *context;
    CUresult result = flags == 0 ? fake_enter(&context) : CUDA_ERROR_INVALID_VALUE;
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

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice ordinal) {
    int device;
    pthread_mutex_lock(&fake_lock);
    CUresult result = find_device(ordinal, &device);
    if (result == CUDA_SUCCESS) {
        if (!primary[device].alive)
            init_context(&primary[device], device, 0);
        primary[device].references++;
        *out = (CUcontext)&primary[device];
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

static CUresult release_primary(CUdevice ordinal, bool reset) {
    int device;
    pthread_mutex_lock(&fake_lock);
    CUresult result = find_device(ordinal, &device);
    if (result == CUDA_SUCCESS && (!primary[device].alive || primary[device].references == 0))
        result = reset ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    else if (result == CUDA_SUCCESS && (reset || --primary[device].references == 0))
        end_context(&primary[device]);
    pthread_mutex_unlock(&fake_lock);
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
    int device;
    CUresult result = find_device(ordinal, &device);
    if (result == CUDA_SUCCESS) {
        *flags = primary[device].flags;
        *active = primary[device].alive;
    }
    return result;
}

EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice ordinal, unsigned int flags) {
    int device;
    CUresult result = find_device(ordinal, &device);
    if (result == CUDA_SUCCESS)
        primary[device].flags = flags;
    return result;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
    if (!initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
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
    if (!initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    *context = depth > 0 ? (CUcontext)stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *ordinal) {
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    for (*ordinal = 0; fake_state_visible(*ordinal) != context->device; ++*ordinal)
        ;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetApiVersion(CUcontext context, unsigned int *version) {
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
    if (result == CUDA_SUCCESS)
        fake_wait_context(context);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

struct error_name {
    CUresult error;
    const char *name, *text;
};

static const struct error_name errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_SYSTEM_NOT_READY, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
};

static const struct error_name *find_error(CUresult error) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == error)
            return &errors[i];
    return NULL;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **name) {
    const struct error_name *found = find_error(error);
    *name = found ? found->name : NULL;
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
    const struct error_name *found = find_error(error);
    *text = found ? found->text : NULL;
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
