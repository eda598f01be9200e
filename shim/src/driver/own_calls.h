/* The hook's own driver calls: events, capture status, and the context of a stream.
 *
 * Guarantees:
 * - A call between own_calls_begin and own_calls_end invalidates no stream capture of the program.
 * - Each function that needs a context pushes it and pops it again, so the program's current context stays current.
 */
#ifndef SHAREPOD_OWN_CALLS_H
#define SHAREPOD_OWN_CALLS_H

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

/* Return whether the handle is NULL, CU_STREAM_LEGACY or CU_STREAM_PER_THREAD. Such a handle names a default stream of
 * the current context. */
static inline bool stream_is_default(CUstream stream) {
    return (uintptr_t)stream <= 2;
}

/* Return the name of a stream: its handle, with NULL replaced by the default stream that NULL means. So a stream has
 * the same name in every form of a call. `per_thread`: the call is a _ptsz or _ptds form, in which NULL means
 * CU_STREAM_PER_THREAD. */
static inline CUstream stream_named(CUstream stream, bool per_thread) {
    return stream != NULL ? stream : per_thread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
}

/* Hide the following driver calls of this thread from stream captures. Pass the result to own_calls_end. Without an
 * open capture this makes no driver call. */
CUstreamCaptureMode own_calls_begin(void);
void own_calls_end(CUstreamCaptureMode mode);
/* As own_calls_begin, for creating and recording an event. Such a call invalidates no capture of another stream, but
 * blocks while its stream is full. So the beginning of a capture does not wait for it, unlike for calls after
 * own_calls_begin. */
CUstreamCaptureMode own_record_begin(void);
/* Set the number of captures that are open or that the next driver call may open. */
void own_calls_set_captures(uint32_t captures);
/* Wait until no thread makes driver calls that are not hidden, because a capture of the program begins next. Call this
 * after own_calls_set_captures, without a lock. */
void own_calls_settle(void);
void own_calls_after_fork(void);

/* Return true if the stream is capturing: launches into it are recorded into a graph and do not run. */
bool stream_is_capturing(CUstream stream, bool per_thread);
/* Return the context of the stream; NULL: the driver will refuse the stream. */
CUcontext context_of_stream(CUstream stream);

/* Return the driver's unique number of a context; 0: the driver does not report one. Unlike a handle, a number is never
 * used again. */
unsigned long long context_number(CUcontext context);

/* Create an event of the hook in this context; NULL: the driver refuses. */
CUevent event_make(CUcontext context, unsigned flags);
/* Record an event of this context in a stream of the context. Return the driver's answer. */
CUresult event_record(CUcontext context, CUevent event, CUstream stream);
/* Return true if this answer to a query of an event or stream means that its work is over. */
bool work_over(CUresult answer);
/* Return whether the work before an event of this context is over. */
bool event_passed(CUevent event, CUcontext context);

#endif
