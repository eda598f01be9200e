/* The hook's own calls of the driver: events, capture status, the context of a stream.
 *
 * Guarantees:
 * - a call between own_calls_begin and own_calls_end disturbs no stream capture of the program;
 * - each function that needs a context pushes and pops it: the program's current context stays current.
 */
#ifndef SHAREPOD_OWN_CALLS_H
#define SHAREPOD_OWN_CALLS_H

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

/* Return whether the handle means a stream of the current context: NULL, CU_STREAM_LEGACY or CU_STREAM_PER_THREAD. */
static inline bool stream_is_default(CUstream stream) {
    return (uintptr_t)stream <= 2;
}

/* Return the one name of a stream, the same for every form of a call; `per_thread`: the form is _ptsz or _ptds. */
static inline CUstream stream_named(CUstream stream, bool per_thread) {
    return stream != NULL ? stream : per_thread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
}

/* Hide the following calls of this thread from stream captures; pass the result to own_calls_end. Without an open
 * capture this makes no driver call. */
CUstreamCaptureMode own_calls_begin(void);
void own_calls_end(CUstreamCaptureMode mode);
/* The same for an event that is made and recorded, which waits for room in a stream that is full, and which breaks no
 * capture of another stream: no capture waits for it. */
CUstreamCaptureMode own_record_begin(void);
/* Set how many captures are open, or may be after the next call of the driver. */
void own_calls_set_captures(uint32_t captures);
/* Wait until no thread makes calls that are not hidden: the program's capture begins next. After
 * own_calls_set_captures, with no lock. */
void own_calls_settle(void);
void own_calls_after_fork(void);

/* Return whether a launch into the stream is recorded by a capture instead of run. */
bool stream_is_capturing(CUstream stream, bool per_thread);
/* Return the context that the stream's work runs in; NULL: the driver will refuse the stream. */
CUcontext context_of_stream(CUstream stream);

/* Return the number of a context, which no other one ever has, of whatever handle; 0: the driver tells none. */
unsigned long long context_number(CUcontext context);

/* Make an event of the hook's own in that context; NULL if the driver makes none. */
CUevent event_make(CUcontext context, unsigned flags);
/* Record an event of that context in a stream of it. */
CUresult event_record(CUcontext context, CUevent event, CUstream stream);
/* Return whether the driver's answer to a query means that the work is over. */
bool work_over(CUresult answer);
/* Return whether the work before an event of that context is over. */
bool event_passed(CUevent event, CUcontext context);

#endif
