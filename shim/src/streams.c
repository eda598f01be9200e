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
        *free_place = (struct known_context){.context = context};
    return free_place;
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
    if (context == NULL || (entry->word == word && entry->stream == stream && entry->per_thread == per_thread &&
                            entry->context == context))
        return;
    lock(&streams->lock);
    uint32_t epoch = streams->epoch;
    struct known_context *known = note_context(streams, context);
    if (known != NULL)
        known->pending = true;
    struct known_stream *known_stream = note_stream(streams, context, streams_default(stream) ? NULL : stream);
    if (known_stream != NULL)
        known_stream->pending = true;
    if (entry->context != context || entry->epoch != epoch) {
        for (int i = 0; i < FENCES; i++) {
            if (entry->events[i] != NULL && entry->epoch == epoch) /* else they went with a context that ended */
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
    entry->epoch = epoch;
    entry->metered = (word & GATE_METERED) != 0;
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
    streams->epoch++;
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

static CUresult destroy_context(CUresult (*destroy)(CUcontext), CUcontext context) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || destroy == NULL)
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    struct streams *streams = &the_process->streams;
    lock(&streams->lock);
    result = destroy(context);
    if (result == CUDA_SUCCESS)
        forget_context(streams, context);
    unlock(&streams->lock);
    if (result == CUDA_SUCCESS)
        memory_forget_context(context);
    return result;
}

EXPORT CUresult cuCtxDestroy(CUcontext context) {
    return destroy_context(DRIVER(cuCtxDestroy), context);
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext context) {
    return destroy_context(DRIVER(cuCtxDestroy_v2), context);
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
    result = end(device);
    if (result == CUDA_SUCCESS && context != NULL && !reset)
        if (DRIVER(cuDevicePrimaryCtxGetState)(device, &flags, &active) != CUDA_SUCCESS || active)
            context = NULL;
    if (result == CUDA_SUCCESS && context != NULL)
        forget_context(streams, context);
    unlock(&streams->lock);
    if (result == CUDA_SUCCESS && context != NULL)
        memory_forget_context(context);
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
