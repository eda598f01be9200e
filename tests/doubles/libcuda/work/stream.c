/* Streams of the double. */
#include <stdlib.h>

#include "device/fake.h"
#include "memory/pool.h"

/* The lowest priority is 0. The highest is that of every GPU since Volta. */
enum { PRIORITY_GREATEST = -5 };

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result == CUDA_SUCCESS && least != NULL)
        *least = 0;
    if (result == CUDA_SUCCESS && greatest != NULL)
        *greatest = PRIORITY_GREATEST;
    return result;
}

static uint64_t streams_made; /* ids are never used again */

/* Return the context's last destroyed stream for reuse, if all of its work has ended. So handles are reused, as by the
 * real driver. NULL: a new stream must be created. With fake_lock. */
static struct stream *take_again(struct context *context) {
    struct stream *stream = context->destroyed;
    fake_settle(context->device);
    if (stream == NULL || stream->listed || stream->capture != NULL || !fake_stream_idle(stream))
        return NULL;
    context->destroyed = stream->next;
    stream->green = false;
    return stream; /* its counters continue, because a thread may still wait for the old stream */
}

EXPORT CUresult cuStreamCreateWithPriority(CUstream *out, unsigned int flags, int priority) {
    if (out == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    struct stream *stream = take_again(context);
    if (stream == NULL)
        stream = calloc(1, sizeof *stream);
    stream->flags = flags;
    stream->priority = priority < PRIORITY_GREATEST ? PRIORITY_GREATEST : priority > 0 ? 0 : priority;
    stream->id = ++streams_made;
    fake_add_stream(context, stream);
    pthread_mutex_unlock(&fake_lock);
    *out = (CUstream)stream;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGreenCtxStreamCreate(CUstream *out, CUgreenCtx green, unsigned int flags, int priority) {
    CUcontext context, before;
    CUresult result = cuCtxFromGreenCtx(&context, green);
    if (result == CUDA_SUCCESS)
        result = (flags & CU_STREAM_NON_BLOCKING) ? cuCtxPushCurrent_v2(context) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    result = cuStreamCreateWithPriority(out, flags, priority);
    if (result == CUDA_SUCCESS)
        ((struct stream *)*out)->green = true;
    cuCtxPopCurrent_v2(&before);
    return result;
}

EXPORT CUresult cuStreamCreate(CUstream *out, unsigned int flags) {
    if (out == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    return cuStreamCreateWithPriority(out, flags, 0);
}

EXPORT CUresult cuStreamDestroy_v2(CUstream handle) {
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    struct stream *stream = fake_is(handle, MAGIC_STREAM) ? (struct stream *)handle : NULL;
    if (stream == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&fake_lock);
    stream->magic = 0;
    if (stream->capture != NULL)
        stream->capture->invalid = true;
    /* The call returns at once, and the stream's work continues. The struct is not freed, because operations point to
     * it. */
    for (struct stream **at = &stream->context->streams; *at != NULL; at = &(*at)->next)
        if (*at == stream) {
            *at = stream->next;
            stream->next = stream->context->destroyed;
            stream->context->destroyed = stream;
            break;
        }
    fake_stream_dropped(stream);
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamSynchronize(CUstream handle) {
    struct stream *stream;
    CUresult result = fake_enter_stream(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    result = fake_stream_sync_call(stream);
    if (result == CUDA_SUCCESS) {
        if (stream == &stream->context->legacy)
            fake_wait_context(stream->context);
        else
            fake_wait_stream(stream);
        fake_pools_waited(stream->context->device);
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuStreamQuery(CUstream handle) {
    struct stream *stream;
    CUresult result = fake_enter_stream(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    result = fake_stream_sync_call(stream);
    if (result == CUDA_SUCCESS && !fake_stream_idle(stream))
        result = CUDA_ERROR_NOT_READY;
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuStreamGetCtx(CUstream handle, CUcontext *context) {
    if (context == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    struct stream *stream;
    CUresult result = fake_enter_stream(handle, &stream);
    if (result == CUDA_SUCCESS && stream->green)
        return CUDA_ERROR_NOT_SUPPORTED; /* only the second version of the call reports it */
    if (result == CUDA_SUCCESS)
        *context = (CUcontext)stream->context;
    return result;
}

/* For a stream of a green context, the context is the device's primary context. */
EXPORT CUresult cuStreamGetCtx_v2(CUstream handle, CUcontext *context, CUgreenCtx *green) {
    if (context == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    struct stream *stream;
    CUresult result = fake_enter_stream(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    *context = stream->green ? fake_primary(stream->context->device) : (CUcontext)stream->context;
    if (green != NULL)
        *green = stream->green ? (CUgreenCtx)stream->context : NULL;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetFlags(CUstream handle, unsigned int *flags) {
    if (flags == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    struct stream *stream;
    CUresult result = fake_enter_stream(handle, &stream);
    if (result == CUDA_SUCCESS)
        *flags = stream->flags;
    return result;
}

EXPORT CUresult cuStreamGetPriority(CUstream handle, int *priority) {
    if (priority == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    struct stream *stream;
    CUresult result = fake_enter_stream(handle, &stream);
    if (result == CUDA_SUCCESS)
        *priority = stream->priority;
    return result;
}

/* Check of a query about a stream that an open capture forbids, as observed on a real driver. */
static CUresult unsafe_question(void) {
    pthread_mutex_lock(&fake_lock);
    CUresult result = fake_unsafe_call();
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuStreamGetId(CUstream handle, unsigned long long *id) {
    if (id == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    struct stream *stream;
    CUresult result = fake_enter_stream(handle, &stream);
    if (result == CUDA_SUCCESS)
        result = unsafe_question();
    if (result == CUDA_SUCCESS)
        *id = stream->id != 0 ? stream->id : (uintptr_t)stream; /* a default stream */
    return result;
}

EXPORT CUresult cuStreamGetDevice(CUstream handle, CUdevice *device) {
    if (device == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    struct stream *stream;
    CUresult result = fake_enter_stream(handle, &stream);
    if (result == CUDA_SUCCESS)
        result = unsafe_question();
    if (result == CUDA_SUCCESS)
        *device = fake_ordinal_of(stream->context->device);
    return result;
}

EXPORT CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void *argument) {
    struct stream *stream;
    CUresult result = fake_enter_stream(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (function == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    struct work work = {.type = CU_GRAPH_NODE_TYPE_HOST, .function = function, .argument = argument};
    pthread_mutex_lock(&fake_lock);
    result = fake_submit_work(stream, &work);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuLaunchHostFunc_v2(CUstream handle, CUhostFn function, void *argument, unsigned int mode) {
    (void)mode;
    return cuLaunchHostFunc(handle, function, argument);
}

struct callback {
    CUstream stream;
    CUstreamCallback function;
    void *argument;
};

static void run_callback(void *of) {
    struct callback callback = *(struct callback *)of;
    free(of);
    callback.function(callback.stream, CUDA_SUCCESS, callback.argument);
}

EXPORT CUresult cuStreamAddCallback(CUstream handle, CUstreamCallback function, void *argument, unsigned int flags) {
    struct stream *stream;
    CUresult result = fake_enter_stream(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (function == NULL || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct callback *kept = malloc(sizeof *kept);
    *kept = (struct callback){handle, function, argument};
    pthread_mutex_lock(&fake_lock);
    result = fake_not_captured(stream); /* a capture does not accept callbacks */
    if (result == CUDA_SUCCESS)
        fake_submit(stream, (struct op){.kind = OP_HOST, .call = run_callback, .argument = kept});
    pthread_mutex_unlock(&fake_lock);
    if (result != CUDA_SUCCESS)
        free(kept);
    return result;
}
