/* Wrapped calls that end a stream or a context.
 *
 * The registry removes the handles before the driver's call (R2, streams.h). No lock is held during that call (R4,
 * streams.h), because it may wait for the stream's work.
 */
#include "driver/own_calls.h"
#include "memory/charge.h"
#include "process/process.h"
#include "time/captures.h"
#include "time/streams.h"
#include "wrappers/memory/contexts.h"

/* Remove the entries of all captures in a context, or, if `context` is NULL, in a stream. The caller holds the lock of
 * struct streams. */
static void forget_captures(struct streams *streams, CUcontext context, CUstream stream) {
    for (unsigned i = streams->captures.count; i > 0; i--) {
        const struct open_capture *capture = streams_capture(streams, i - 1);
        if (context != NULL ? capture->context == context : capture->stream == stream)
            captures_forget(streams, &the_process->gate, i - 1);
    }
}

/* Remove a stream from the registry before it is destroyed. The driver finishes its work, so record an event behind
 * that work for the drain. */
static void let_go(struct streams *streams, CUstream stream) {
    lock(&streams->lock);
    for (struct known_context *known = streams->contexts; known != NULL; known = known->next) {
        struct known_stream *row = known->ending ? NULL : streams_find(streams, known, stream);
        if (row == NULL)
            continue;
        if (row->pending || row->waiting)
            captures_fence(streams, row, true);
        streams_forget(streams, row, true);
    }
    forget_captures(streams, NULL, stream);
    unlock(&streams->lock);
}

static CUresult destroy_stream(CUresult (*destroy)(CUstream), CUstream stream) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || destroy == NULL)
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    if (!stream_is_default(stream))
        let_go(&the_process->streams, stream);
    return destroy(stream);
}

EXPORT CUresult cuStreamDestroy(CUstream stream) {
    return destroy_stream(DRIVER(cuStreamDestroy), stream);
}

EXPORT CUresult cuStreamDestroy_v2(CUstream stream) {
    return destroy_stream(DRIVER(cuStreamDestroy_v2), stream);
}

/* Return a substitute handle, under which a context's allocations are listed while the driver destroys the context. The
 * driver may give the context's own handle to a new context at once. A substitute is odd, unlike all handles of
 * contexts. */
static CUcontext departing(CUcontext context) {
    return (CUcontext)((uintptr_t)context | 1);
}

/* Wait, for at most 1 s, until the hook's driver calls with handles of the ending contexts have returned. A call that
 * takes longer is blocked in a full stream, and perhaps only the end of the context wakes it. */
static void await_calls(struct streams *streams, uint32_t end) {
    bool in_call = end != 0;
    for (uint64_t now = sys_now(), until = now + SYS_SECOND; in_call && now < until; now = sys_now()) {
        in_call = false;
        lock(&streams->lock);
        for (const struct known_context *known = streams->contexts; known != NULL; known = known->next)
            in_call |= known->ending == end && streams_in_call(known);
        unlock(&streams->lock);
        if (in_call)
            sys_sleep(20 * 1000ull);
    }
}

/* Mark a context as ending, before the driver's call. Until the call has returned, a drain makes no driver calls about
 * the context, but does not finish either. A context that is created with the same handle during the call gets an entry
 * of its own. Return the number of this end; 0: no memory. */
static uint32_t depart(struct streams *streams, CUcontext context) {
    if (context == NULL)
        return 0;
    memory_rename_context(context, departing(context));
    lock(&streams->lock);
    struct known_context *known = streams_find_context(streams, context);
    if (known == NULL && (known = streams_note_context(streams, context)) != NULL)
        known->for_end = true;
    uint32_t end = known == NULL ? 0 : ++streams->ends != 0 ? streams->ends : ++streams->ends;
    for (; known != NULL; known = streams_find_context(streams, context)) {
        known->ending = end;
        streams_depart(known, true);
    }
    unlock(&streams->lock);
    await_calls(streams, end);
    return end;
}

/* After the driver's call: if the context has ended, remove its entry and return its charges; else undo `depart`.
 * `dead`: contexts that were recorded with its handle during the call have also ended, if their epoch is at most
 * `dead`; 0: none has. */
static void settle(struct streams *streams, CUcontext context, uint32_t end, bool ended, uint32_t dead) {
    if (context == NULL)
        return;
    if (ended)
        memory_forget_context(departing(context));
    else
        memory_rename_context(departing(context), context);
    lock(&streams->lock);
    for (struct known_context *next, *known = streams->contexts; known != NULL && end != 0; known = next) {
        next = known->next;
        bool noted_amid = known->amid == end, unused = known->for_end && known->streams == NULL;
        if ((known->ending == end && (ended || unused)) || (noted_amid && known->epoch <= dead)) {
            if (unused && known->epoch == streams->epochs)
                streams->epochs--; /* undo the count of an entry that was made only for this call */
            streams_forget_context(streams, known);
        } else if (noted_amid) {
            known->amid = 0;
        } else if (known->ending == end) {
            known->ending = 0;
            known->for_end = false;
            streams_depart(known, false);
        }
    }
    if (ended && streams_find_context(streams, context) == NULL)
        forget_captures(streams, context, NULL);
    unlock(&streams->lock);
}

static CUresult destroy_context(CUresult (*destroy)(CUcontext), CUcontext context) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || destroy == NULL)
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    struct streams *streams = &the_process->streams;
    uint32_t end = depart(streams, context);
    result = destroy(context);
    settle(streams, context, end, result == CUDA_SUCCESS, 0);
    return result;
}

EXPORT CUresult cuCtxDestroy(CUcontext context) {
    return destroy_context(DRIVER(cuCtxDestroy), context);
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext context) {
    return destroy_context(DRIVER(cuCtxDestroy_v2), context);
}

/* Calls of CUDA 2. A context ends when its last reference is detached. */
EXPORT CUresult cuCtxAttach(CUcontext *context, unsigned int flags) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || !HAS(cuCtxAttach))
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    struct streams *streams = &the_process->streams;
    result = DRIVER(cuCtxAttach)(context, flags);
    if (result != CUDA_SUCCESS || context == NULL)
        return result;
    lock(&streams->lock);
    struct known_context *known = streams_note_context(streams, *context);
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
    struct known_context *known = streams_find_context(streams, context);
    bool last = known == NULL || known->attached == 0;
    if (!last)
        known->attached--;
    unlock(&streams->lock);
    uint32_t end = last ? depart(streams, context) : 0;
    result = DRIVER(cuCtxDetach)(context);
    if (last) {
        settle(streams, context, end, result == CUDA_SUCCESS, 0);
        return result;
    }
    lock(&streams->lock);
    known = streams_find_context(streams, context);
    if (known != NULL && result != CUDA_SUCCESS)
        known->attached++;
    unlock(&streams->lock);
    return result;
}

static bool primary_active(CUdevice device) {
    unsigned flags;
    int active = 0;
    return HAS(cuDevicePrimaryCtxGetState) &&
           DRIVER(cuDevicePrimaryCtxGetState)(device, &flags, &active) == CUDA_SUCCESS && active;
}

/* Return the number of contexts recorded so far, which is the epoch of the last one. */
static uint32_t noted_so_far(struct streams *streams) {
    lock(&streams->lock);
    uint32_t epochs = streams->epochs;
    unlock(&streams->lock);
    return epochs;
}

/* Return the primary context of a device if it is active, else an empty entry. Queries the driver, because the program
 * may have retained the context in a call that the hook has not seen. */
static struct primary ask_primary(CUdevice device) {
    struct primary primary = {.context = NULL};
    if (!primary_active(device) || DRIVER(cuDevicePrimaryCtxRetain)(&primary.context, device) != CUDA_SUCCESS)
        return primary;
    primary.number = context_number(primary.context);
    HAS(cuDevicePrimaryCtxRelease_v2) ? DRIVER(cuDevicePrimaryCtxRelease_v2)(device)
                                      : DRIVER(cuDevicePrimaryCtxRelease)(device);
    return primary;
}

/* Get the device of a context. Return false if the context cannot be made current. */
static bool device_of_context(CUcontext context, CUdevice *device) {
    CUcontext popped;
    if (context == NULL || !HAS(cuCtxGetDevice) || DRIVER(cuCtxPushCurrent_v2)(context) != CUDA_SUCCESS)
        return false;
    bool known = DRIVER(cuCtxGetDevice)(device) == CUDA_SUCCESS;
    DRIVER(cuCtxPopCurrent_v2)(&popped);
    return known;
}

/* Memory that was allocated while the green context was current belongs to the device's primary context, and lives as
 * long as that context. */
EXPORT CUresult cuGreenCtxDestroy(CUgreenCtx green) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || !HAS(cuGreenCtxDestroy))
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    struct streams *streams = &the_process->streams;
    CUcontext context = NULL;
    if (!HAS(cuCtxFromGreenCtx) || DRIVER(cuCtxFromGreenCtx)(&context, green) != CUDA_SUCCESS)
        context = NULL;
    CUdevice device = 0;
    struct primary primary = {.context = NULL};
    if (device_of_context(context, &device))
        primary = ask_primary(device);
    uint32_t end = depart(streams, context);
    result = DRIVER(cuGreenCtxDestroy)(green);
    if (result == CUDA_SUCCESS && primary.context != NULL && primary_active(device))
        memory_hand_over(departing(context), primary.context);
    settle(streams, context, end, result == CUDA_SUCCESS, 0);
    return result;
}

/* If this is not the last reference to the primary context, make the call, and return true. primaries_lock is held
 * during the call, so that another thread's release of the last reference follows it. Otherwise return false: the call
 * may end the context, and the caller must make it. `*last` is then the context's former entry. */
static bool release_one(CUresult (*call)(CUdevice), CUdevice device, bool reset, struct primary *last,
                        CUresult *result) {
    struct streams *streams = &the_process->streams;
    if (device < 0 || device >= STREAMS_DEVICES)
        return false;
    struct primary *primary = &streams->primaries[device];
    lock(&streams->primaries_lock);
    bool one_of_several = !reset && primary->retained > 1;
    if (one_of_several) {
        *result = call(device);
        primary->retained -= *result == CUDA_SUCCESS;
    } else {
        *last = *primary;
        *primary = (struct primary){.before = last->context != NULL ? last->context : last->before};
    }
    unlock(&streams->primaries_lock);
    return one_of_several;
}

/* After a call that may have ended the primary context: return whether a primary context is active. `*same`: it is the
 * context in `last`. A thread that has retained the context during the call has recorded its number, or has retained it
 * and waits for the lock. */
static bool primary_lives(CUdevice device, const struct primary *last, bool *same) {
    struct streams *streams = &the_process->streams;
    unsigned long long number = last->number;
    lock(&streams->primaries_lock);
    bool active = primary_active(device);
    if (device >= 0 && device < STREAMS_DEVICES && streams->primaries[device].retained > 0)
        number = streams->primaries[device].number;
    else if (active && number != 0)
        number = context_number(last->context);
    unlock(&streams->primaries_lock);
    *same = active && number == last->number;
    return active;
}

/* A release ends the primary context if it releases the last reference. A reset always ends it. Another thread may
 * retain the context during the call:
 * - Before the end: a release then does not end the context. A reset also ends the work of that thread.
 * - After the end: that thread gets a new primary context, perhaps with the same handle.
 */
static CUresult end_primary(CUresult (*call)(CUdevice), CUdevice device, bool reset) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || call == NULL)
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    struct streams *streams = &the_process->streams;
    struct primary last = {.context = NULL};
    bool same = true;
    if (release_one(call, device, reset, &last, &result))
        return result;
    CUcontext before = last.before;
    if (last.context == NULL)
        last = ask_primary(device);
    if (last.context == NULL && reset)
        last.context = before; /* a thread may retain the context before the reset reaches it */
    uint32_t end = depart(streams, last.context);
    result = call(device);
    uint32_t noted = noted_so_far(streams);
    bool lives = last.context == NULL || result != CUDA_SUCCESS || primary_lives(device, &last, &same);
    settle(streams, last.context, end, result == CUDA_SUCCESS && (reset || !same), lives ? 0 : noted);
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
