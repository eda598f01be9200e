/* See streams.h. Here: registering, and what ends a stream or a context. */
#include "streams.h"

#include "memory.h"
#include "process.h"

CUstreamCaptureMode streams_hide(void) {
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (!HAS(cuThreadExchangeStreamCaptureMode) || DRIVER(cuThreadExchangeStreamCaptureMode)(&mode) != CUDA_SUCCESS)
        return CU_STREAM_CAPTURE_MODE_RELAXED;
    return mode;
}

void streams_unhide(CUstreamCaptureMode mode) {
    if (HAS(cuThreadExchangeStreamCaptureMode))
        DRIVER(cuThreadExchangeStreamCaptureMode)(&mode);
}

CUevent streams_make_event(CUcontext context) {
    CUevent event = NULL;
    CUcontext popped;
    if (DRIVER(cuCtxPushCurrent_v2)(context) != CUDA_SUCCESS)
        return NULL;
    if (DRIVER(cuEventCreate)(&event, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC) != CUDA_SUCCESS)
        event = NULL;
    DRIVER(cuCtxPopCurrent_v2)(&popped);
    return event;
}

bool streams_is_capturing(CUstream stream, bool per_thread) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = CUDA_ERROR_NOT_FOUND;
    if (per_thread && HAS(cuStreamIsCapturing_ptsz))
        result = DRIVER(cuStreamIsCapturing_ptsz)(stream, &status);
    else if (HAS(cuStreamIsCapturing))
        result = DRIVER(cuStreamIsCapturing)(stream, &status);
    return result == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

static CUcontext context_of(CUstream stream) {
    CUcontext context = NULL;
    if (!streams_default(stream) && HAS(cuStreamGetCtx) && DRIVER(cuStreamGetCtx)(stream, &context) == CUDA_SUCCESS &&
        context != NULL)
        return context;
    return DRIVER(cuCtxGetCurrent)(&context) == CUDA_SUCCESS ? context : NULL;
}

/* The rest with the registry's lock. */

static struct known_context *note_context(struct streams *streams, CUcontext context) {
    struct known_context *free_place = NULL;
    for (unsigned i = 0; i < streams->context_count; i++) {
        if (streams->contexts[i].context == context)
            return &streams->contexts[i];
        if (streams->contexts[i].context == NULL && free_place == NULL)
            free_place = &streams->contexts[i];
    }
    if (free_place == NULL && streams->context_count < STREAMS_CONTEXTS)
        free_place = &streams->contexts[streams->context_count++];
    if (free_place != NULL)
        *free_place = (struct known_context){.context = context, .born = ++streams->births};
    return free_place;
}

static struct known_context *find_context(struct streams *streams, CUcontext context) {
    for (unsigned i = 0; i < streams->context_count; i++)
        if (context != NULL && streams->contexts[i].context == context)
            return &streams->contexts[i];
    return NULL;
}

static struct known_stream *note_stream(struct streams *streams, CUcontext context, CUstream stream) {
    struct known_stream *free_place = NULL;
    for (unsigned i = 0; i < streams->stream_count; i++) {
        if (streams->streams[i].context == context && streams->streams[i].stream == stream)
            return &streams->streams[i];
        if (streams->streams[i].context == NULL && free_place == NULL)
            free_place = &streams->streams[i];
    }
    if (free_place == NULL && streams->stream_count < STREAMS_MOST)
        free_place = &streams->streams[streams->stream_count++];
    if (free_place == NULL &&
        stream != NULL) /* full: an event on the legacy stream waits for all but non-blocking ones */
        return note_stream(streams, context, NULL);
    if (free_place != NULL)
        *free_place = (struct known_stream){.context = context, .stream = stream};
    return free_place;
}

void streams_register(struct streams *streams, CUstream stream, bool per_thread, uint32_t word,
                      struct slot_stream *entry) {
    CUcontext context = context_of(stream);
    if (context == NULL) { /* the driver will refuse it; what is remembered here is another stream */
        entry->word = 0;
        entry->metered = false;
        return;
    }
    if (entry->word == word && entry->stream == stream && entry->per_thread == per_thread && entry->context == context)
        return;
    lock(&streams->lock);
    struct known_context *known = note_context(streams, context);
    uint32_t born = known ? known->born : 0;
    if (known != NULL)
        known->pending = true;
    struct known_stream *known_stream = note_stream(streams, context, streams_default(stream) ? NULL : stream);
    if (known_stream != NULL)
        known_stream->pending = true;
    if (entry->context != context || entry->born != born) {
        struct known_context *before = find_context(streams, entry->context);
        bool alive = before != NULL && before->born == entry->born; /* else they went with it */
        for (int i = 0; i < FENCES; i++) {
            if (entry->events[i] != NULL && alive)
                DRIVER(cuEventDestroy_v2)(entry->events[i]);
            entry->events[i] = NULL;
        }
        entry->count = entry->fences = 0;
    } /* else they go on bounding the queue, whatever stream they were recorded on */
    unlock(&streams->lock);

    if (entry->window == 0)
        entry->window = 1;
    entry->stream = stream;
    entry->per_thread = per_thread;
    entry->context = context;
    entry->born = born;
    entry->metered = (word & GATE_METERED) != 0 && born != 0; /* nobody would say when an unknown context ends */
    entry->word =
        word & GATE_CAPTURING ? 0 : word; /* while a capture is open each launch asks whether it is recorded */
}

static void forget_capture(struct streams *streams, unsigned which) {
    struct gate *gate = &the_process->gate;
    unsigned last = atomic_load(&gate->captures) - 1;
    streams->captures[which] = streams->captures[last];
    gate_set_captures(gate, last);
}

static void forget_context(struct streams *streams, CUcontext context) {
    for (unsigned i = 0; i < streams->context_count; i++)
        if (streams->contexts[i].context == context)
            streams->contexts[i] = (struct known_context){0};
    for (unsigned i = 0; i < streams->stream_count; i++)
        if (streams->streams[i].context == context)
            streams->streams[i] = (struct known_stream){0};
    for (unsigned i = atomic_load(&the_process->gate.captures); i > 0; i--)
        if (streams->captures[i - 1].context == context)
            forget_capture(streams, i - 1);
    gate_renew(&the_process->gate);
}

/* Before a stream is destroyed: its unfinished work goes on, and is waited for by an event. */
static void orphan_stream(struct streams *streams, CUstream stream) {
    for (unsigned i = 0; i < streams->stream_count; i++) {
        struct known_stream *known = &streams->streams[i];
        if (known->context == NULL || known->stream != stream)
            continue;
        CUstreamCaptureMode mode = streams_hide();
        if (known->pending && !streams_is_capturing(stream, false)) {
            if (known->event == NULL)
                known->event = streams_make_event(known->context);
            known->waiting = known->event != NULL && DRIVER(cuEventRecord)(known->event, stream) == CUDA_SUCCESS;
        }
        if (!known->waiting && known->event != NULL)
            DRIVER(cuEventDestroy_v2)(known->event);
        streams_unhide(mode);
        if (known->waiting)
            *known = (struct known_stream){
                .context = known->context, .stream = STREAM_ORPHAN, .event = known->event, .waiting = true};
        else
            *known = (struct known_stream){0};
    }
    for (unsigned i = atomic_load(&the_process->gate.captures); i > 0; i--)
        if (streams->captures[i - 1].stream == stream && !streams_default(stream))
            forget_capture(streams, i - 1);
    gate_renew(&the_process->gate);
}

static CUresult destroy_stream(CUresult (*destroy)(CUstream), CUstream stream) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || destroy == NULL)
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    struct streams *streams = &the_process->streams;
    lock(&streams->lock);
    if (!streams_default(stream))
        orphan_stream(streams, stream);
    result = destroy(stream);
    unlock(&streams->lock);
    return result;
}

EXPORT CUresult cuStreamDestroy(CUstream stream) {
    return destroy_stream(DRIVER(cuStreamDestroy), stream);
}

EXPORT CUresult cuStreamDestroy_v2(CUstream stream) {
    return destroy_stream(DRIVER(cuStreamDestroy_v2), stream);
}

/* The handle that the allocations of a context are booked under while it may be ending: the driver may give its own to
 * a new context at once. No context has an odd one. */
static CUcontext ending(CUcontext context) {
    return (CUcontext)((uintptr_t)context | 1);
}

static void settle(struct streams *streams, CUcontext context, bool gone) {
    if (gone) {
        forget_context(streams, context);
        memory_forget_context(ending(context));
    } else {
        memory_rename_context(ending(context), context);
    }
}

static CUresult destroy_context(CUresult (*destroy)(CUcontext), CUcontext context) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || destroy == NULL)
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    struct streams *streams = &the_process->streams;
    lock(&streams->lock);
    memory_rename_context(context, ending(context));
    result = destroy(context);
    settle(streams, context, result == CUDA_SUCCESS);
    unlock(&streams->lock);
    return result;
}

EXPORT CUresult cuCtxDestroy(CUcontext context) {
    return destroy_context(DRIVER(cuCtxDestroy), context);
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext context) {
    return destroy_context(DRIVER(cuCtxDestroy_v2), context);
}

/* The calls of CUDA 2: a context ends with the last of its references. */
EXPORT CUresult cuCtxAttach(CUcontext *context, unsigned int flags) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || !HAS(cuCtxAttach))
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    struct streams *streams = &the_process->streams;
    lock(&streams->lock);
    result = DRIVER(cuCtxAttach)(context, flags);
    struct known_context *known = result == CUDA_SUCCESS && context != NULL ? note_context(streams, *context) : NULL;
    if (known != NULL)
        known->attached++;
    unlock(&streams->lock);
    return result;
}

EXPORT CUresult cuCtxDetach(CUcontext context) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || !HAS(cuCtxDetach))
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    struct streams *streams = &the_process->streams;
    lock(&streams->lock);
    struct known_context *known = find_context(streams, context);
    bool last = known == NULL || known->attached == 0;
    if (last)
        memory_rename_context(context, ending(context));
    result = DRIVER(cuCtxDetach)(context);
    if (last)
        settle(streams, context, result == CUDA_SUCCESS);
    else if (result == CUDA_SUCCESS)
        known->attached--;
    unlock(&streams->lock);
    return result;
}

EXPORT CUresult cuGreenCtxDestroy(CUgreenCtx green) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || !HAS(cuGreenCtxDestroy))
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    struct streams *streams = &the_process->streams;
    CUcontext context = NULL;
    lock(&streams->lock);
    if (!HAS(cuCtxFromGreenCtx) || DRIVER(cuCtxFromGreenCtx)(&context, green) != CUDA_SUCCESS)
        context = NULL;
    if (context != NULL)
        memory_rename_context(context, ending(context));
    result = DRIVER(cuGreenCtxDestroy)(green);
    if (context != NULL)
        settle(streams, context, result == CUDA_SUCCESS);
    unlock(&streams->lock);
    return result;
}

/* A release ends the primary context only with its last reference; a reset always. */
static CUresult end_primary(CUresult (*end)(CUdevice), CUdevice device, bool reset) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || end == NULL)
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    struct streams *streams = &the_process->streams;
    CUcontext context = NULL;
    unsigned flags;
    int active = 0;
    lock(&streams->lock);
    if (HAS(cuDevicePrimaryCtxGetState) &&
        DRIVER(cuDevicePrimaryCtxGetState)(device, &flags, &active) == CUDA_SUCCESS && active &&
        DRIVER(cuDevicePrimaryCtxRetain)(&context, device) == CUDA_SUCCESS)
        HAS(cuDevicePrimaryCtxRelease_v2) ? DRIVER(cuDevicePrimaryCtxRelease_v2)(device)
                                          : DRIVER(cuDevicePrimaryCtxRelease)(device);
    if (context != NULL)
        memory_rename_context(context, ending(context));
    result = end(device);
    bool gone = result == CUDA_SUCCESS;
    if (gone && context != NULL && !reset)
        gone = DRIVER(cuDevicePrimaryCtxGetState)(device, &flags, &active) == CUDA_SUCCESS && !active;
    if (context != NULL)
        settle(streams, context, gone);
    unlock(&streams->lock);
    return result;
}

EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    return end_primary(DRIVER(cuDevicePrimaryCtxRelease), device, false);
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    return end_primary(DRIVER(cuDevicePrimaryCtxRelease_v2), device, false);
}

EXPORT CUresult cuDevicePrimaryCtxReset(CUdevice device) {
    return end_primary(DRIVER(cuDevicePrimaryCtxReset), device, true);
}

EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    return end_primary(DRIVER(cuDevicePrimaryCtxReset_v2), device, true);
}
