/* Wrapped calls that make streams wait for the program: for a function, a value, an event or a semaphore. They bypass
 * the gate (ungated work). Before each call, the hook records a fence behind metered launches into the stream, so that
 * no drain waits for the call's work (D3, drain.h), and notes the wait (time/waits.h).
 *
 * The driver gets a function of the hook, which calls the program's; except in a capture. So the hook knows without an
 * event whether the program's function has returned.
 */
#include "driver/own_calls.h"
#include "time/captures.h"
#include "time/streams.h"
#include "time/waits.h"
#include "wrappers/work/passthrough.h"

/* A call that puts a wait into a stream. */
struct hold {
    bool noted;                /* waits_held must follow the driver's call */
    struct program_wait *wait; /* entry of the wait in the registry; NULL: none */
    struct host_call *call;    /* the program's host function, if the driver gets a function of the hook in its place;
                                  NULL: the driver gets the program's function unchanged */
};

/* Before a wait that the program puts into the stream: record a fence behind the launches, then note the wait in the
 * registry (Q6, meter.h). The fence must come first, because behind the wait the stream may be full. A capture records
 * the call, which then runs nothing. `function`: the function that the stream waits for, or NULL. `event`: the stream
 * waits for an event, so for the program only if the event does. */
static struct hold before_wait(CUstream stream, bool per_thread, const struct host_call *function, bool event) {
    struct streams *streams = &the_process->streams;
    if (atomic_load(&the_process->gate.captures) > 0 && stream_is_capturing(stream, per_thread))
        return (struct hold){0};
    pass_by(stream, per_thread);
    if (!stream_is_default(stream))
        waits_make_room(streams, &the_process->gate, stream);
    struct host_call *call = function != NULL ? waits_keep_call(streams, function) : NULL;
    struct program_wait *wait = waits_hold(streams, stream_named(stream, per_thread), NULL, call);
    waits_fence(streams, wait, stream);
    if (wait == NULL && call != NULL)
        waits_free_call(streams, call);
    else if (call != NULL)
        atomic_fetch_add(&streams->functions, 1);
    if (!event && (wait == NULL || call == NULL))
        atomic_store(&streams->holds, true);
    return (struct hold){.noted = true, .wait = wait, .call = wait != NULL ? call : NULL};
}

/* After the driver's call: if the driver has refused it, remove the entry of the wait, because no function will be
 * called. */
static void after_wait(const struct hold *hold, CUresult result) {
    if (hold->noted)
        waits_held(&the_process->streams);
    if (hold->call != NULL && result != CUDA_SUCCESS)
        waits_call_returned(&the_process->streams, hold->call);
    else if (hold->wait != NULL && result != CUDA_SUCCESS)
        waits_cancel(&the_process->streams, hold->wait);
}

/* Define a wrapper. `waits`: true if the call puts a wait into the stream. */
#define WAITS_IF(waits, symbol, stream, per_thread, parameters, ...)               \
    EXPORT CUresult symbol parameters {                                            \
        CUresult result = process_enter();                                         \
        if (result != CUDA_SUCCESS)                                                \
            return result;                                                         \
        struct hold hold = {0};                                                    \
        if (waits)                                                                 \
            hold = before_wait(stream, per_thread, NULL, false);                   \
        result = HAS(symbol) ? DRIVER(symbol)(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND; \
        after_wait(&hold, result);                                                 \
        return result;                                                             \
    }

#define WAITS(symbol, stream, per_thread, parameters, ...) \
    WAITS_IF(true, symbol, stream, per_thread, parameters, __VA_ARGS__)

/* Return true if a batch may contain a wait. Writes, barriers and flushes do not wait, so a drain waits for launches
 * behind them. */
static bool batch_waits(const CUstreamBatchMemOpParams *batch, unsigned int count) {
    for (unsigned int i = 0; batch != NULL && i < count; i++)
        switch (batch[i].operation) {
        case CU_STREAM_MEM_OP_WRITE_VALUE_32:
        case CU_STREAM_MEM_OP_WRITE_VALUE_64:
        case CU_STREAM_MEM_OP_BARRIER:
        case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES: break;
        default: return true;
        }
    return false;
}

#define BATCH(symbol, per_thread)                                                                                     \
    WAITS_IF(batch_waits(paramArray, count), symbol, stream, per_thread,                                              \
             (CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray, unsigned int flags), stream, \
             count, paramArray, flags)

static void CUDA_CB run_function(void *of) {
    struct host_call *call = of;
    atomic_store(&call->begun, true);
    call->function(call->argument);
    waits_call_returned(&the_process->streams, call);
}

static void CUDA_CB run_callback(CUstream stream, CUresult status, void *of) {
    struct host_call *call = of;
    atomic_store(&call->begun, true);
    call->callback(stream, status, call->argument);
    waits_call_returned(&the_process->streams, call);
}

/* Define a wrapper of a call with a host function. `kind`: member of struct host_call for the program's function. `of`:
 * the parameter with that function. `run`: the hook's function. */
#define CALLS(symbol, per_thread, kind, of, run, parameters, ...)                                              \
    EXPORT CUresult symbol parameters {                                                                        \
        CUresult result = process_enter();                                                                     \
        if (result != CUDA_SUCCESS)                                                                            \
            return result;                                                                                     \
        const struct host_call function = {.kind = (of), .argument = userData};                                \
        struct hold hold = before_wait(hStream, per_thread, of != NULL ? &function : NULL, false);             \
        bool own = hold.call != NULL;                                                                          \
        result = HAS(symbol) ? DRIVER(symbol)(hStream, own ? run : of, own ? hold.call : userData __VA_ARGS__) \
                             : CUDA_ERROR_NOT_FOUND;                                                           \
        after_wait(&hold, result);                                                                             \
        return result;                                                                                         \
    }

/* A wait for an event of a capture makes the stream join that capture. So the stream's earlier launches are fenced (R5,
 * streams.h), and the drain ignores the stream during the call. Return whether captures_joined must follow the call.
 * Set
 * `*refused` if there is no memory. */
static bool before_join(CUstream stream, bool per_thread, CUresult *refused) {
    if (atomic_load(&the_process->gate.captures) == 0)
        return false;
    pass_by(stream, per_thread); /* first, because no fence is recorded in a stream that may capture */
    CUstreamCaptureMode mode = own_calls_begin();
    bool joins = !stream_is_capturing(stream, per_thread);
    if (joins && !captures_join(&the_process->streams, &the_process->gate, stream_named(stream, per_thread)))
        *refused = CUDA_ERROR_OUT_OF_MEMORY;
    own_calls_end(mode);
    return joins && *refused == CUDA_SUCCESS;
}

#define JOINS(symbol, per_thread)                                                                         \
    EXPORT CUresult symbol(CUstream stream, CUevent event, unsigned flags) {                              \
        CUresult result = process_enter();                                                                \
        bool joins = result == CUDA_SUCCESS && before_join(stream, per_thread, &result);                  \
        if (result != CUDA_SUCCESS)                                                                       \
            return result;                                                                                \
        bool holds = waits_may_hold(&the_process->streams);                                               \
        struct hold held = {0};                                                                           \
        if (holds)                                                                                        \
            held = before_wait(stream, per_thread, NULL, true);                                           \
        else                                                                                              \
            pass_by(stream, per_thread);                                                                  \
        result = HAS(symbol) ? DRIVER(symbol)(stream, event, flags) : CUDA_ERROR_NOT_FOUND;               \
        after_wait(&held, result);                                                                        \
        if (joins)                                                                                        \
            captures_joined(&the_process->streams, &the_process->gate, stream_named(stream, per_thread)); \
        return result;                                                                                    \
    }

CALLS(cuLaunchHostFunc, false, function, fn, run_function, (CUstream hStream, CUhostFn fn, void *userData))
CALLS(cuLaunchHostFunc_ptsz, true, function, fn, run_function, (CUstream hStream, CUhostFn fn, void *userData))
CALLS(cuLaunchHostFunc_v2, false, function, fn, run_function,
      (CUstream hStream, CUhostFn fn, void *userData, unsigned int syncMode), , syncMode)
CALLS(cuLaunchHostFunc_v2_ptsz, true, function, fn, run_function,
      (CUstream hStream, CUhostFn fn, void *userData, unsigned int syncMode), , syncMode)
CALLS(cuStreamAddCallback, false, callback, callback, run_callback,
      (CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags), , flags)
CALLS(cuStreamAddCallback_ptsz, true, callback, callback, run_callback,
      (CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags), , flags)
BATCH(cuStreamBatchMemOp, false)
BATCH(cuStreamBatchMemOp_ptsz, true)
BATCH(cuStreamBatchMemOp_v2, false)
BATCH(cuStreamBatchMemOp_v2_ptsz, true)
WAITS(cuStreamWaitValue32, stream, false, (CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags),
      stream, addr, value, flags)
WAITS(cuStreamWaitValue32_ptsz, stream, true, (CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags),
      stream, addr, value, flags)
WAITS(cuStreamWaitValue32_v2, stream, false, (CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags),
      stream, addr, value, flags)
WAITS(cuStreamWaitValue32_v2_ptsz, stream, true,
      (CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags), stream, addr, value, flags)
WAITS(cuStreamWaitValue64, stream, false, (CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags),
      stream, addr, value, flags)
WAITS(cuStreamWaitValue64_ptsz, stream, true, (CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags),
      stream, addr, value, flags)
WAITS(cuStreamWaitValue64_v2, stream, false, (CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags),
      stream, addr, value, flags)
WAITS(cuStreamWaitValue64_v2_ptsz, stream, true,
      (CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags), stream, addr, value, flags)
JOINS(cuStreamWaitEvent, false)
JOINS(cuStreamWaitEvent_ptsz, true)
WAITS(cuWaitExternalSemaphoresAsync, stream, false,
      (const CUexternalSemaphore *extSemArray, const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS *paramsArray,
       unsigned int numExtSems, CUstream stream),
      extSemArray, paramsArray, numExtSems, stream)
WAITS(cuWaitExternalSemaphoresAsync_ptsz, stream, true,
      (const CUexternalSemaphore *extSemArray, const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS *paramsArray,
       unsigned int numExtSems, CUstream stream),
      extSemArray, paramsArray, numExtSems, stream)

/* Before a call that makes all streams of a context wait. Return true if the caller must call waits_held afterwards.
 */
static bool before_context_waits(CUcontext context) {
    if (context == NULL)
        DRIVER(cuCtxGetCurrent)(&context);
    if (context != NULL)
        meter_before_ungated_context(&the_process->gate, &the_process->streams, context);
    bool holds = context != NULL && waits_may_hold(&the_process->streams);
    if (holds)
        waits_hold(&the_process->streams, CU_STREAM_LEGACY, context, NULL);
    return holds;
}

EXPORT CUresult cuCtxWaitEvent(CUcontext hCtx, CUevent hEvent) {
    CUresult refused = process_enter();
    if (refused != CUDA_SUCCESS)
        return refused;
    bool holds = before_context_waits(hCtx);
    CUresult result = HAS(cuCtxWaitEvent) ? DRIVER(cuCtxWaitEvent)(hCtx, hEvent) : CUDA_ERROR_NOT_FOUND;
    if (holds)
        waits_held(&the_process->streams);
    return result;
}

EXPORT CUresult cuGreenCtxWaitEvent(CUgreenCtx hCtx, CUevent hEvent) {
    CUcontext context = NULL;
    CUresult refused = process_enter();
    if (refused != CUDA_SUCCESS)
        return refused;
    bool holds = HAS(cuCtxFromGreenCtx) && DRIVER(cuCtxFromGreenCtx)(&context, hCtx) == CUDA_SUCCESS &&
                 before_context_waits(context);
    CUresult result = HAS(cuGreenCtxWaitEvent) ? DRIVER(cuGreenCtxWaitEvent)(hCtx, hEvent) : CUDA_ERROR_NOT_FOUND;
    if (holds)
        waits_held(&the_process->streams);
    return result;
}
