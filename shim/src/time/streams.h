/* The registry of contexts and streams that have work which nobody has seen finished, and of open captures.
 *
 * Guarantees:
 * - R1 each stream that a launch went into during the present opening is registered before the launch (P2);
 * - R2 a handle that the program destroys is never used by the hook afterwards;
 * - R3 no call of the hook disturbs a stream capture of the program;
 * - R4 no lock of the hook is held while the driver destroys a stream or a context, or calls the program back;
 * - R5 what a stream ran before a capture began is behind an event (a row with STREAM_ORPHAN);
 * - R6 there is room for as many contexts, streams and captures as there is memory. Where none is left, the launch or
 *   the capture is refused with CUDA_ERROR_OUT_OF_MEMORY.
 */
#ifndef SHAREPOD_STREAMS_H
#define SHAREPOD_STREAMS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/rows.h"
#include "base/sys.h"
#include "driver/entries.h"
#include "driver/own_calls.h"
#include "time/gate.h"

/* Stands for a stream that is not to be touched any more: its last work is behind an event. */
#define STREAM_ORPHAN ((CUstream) ~(uintptr_t)0)

enum { STREAMS_HINTS = 1024 }; /* a power of two; 4 KiB */

struct known_context {
    CUcontext context; /* NULL: a free place */
    CUevent event;
    bool pending;      /* launched into since the last drain */
    bool waiting;      /* `event` is recorded and not yet seen complete */
    bool ending;       /* the driver is destroying it, or about to: its handles are not to be used */
    bool skipped;      /* a drain began meanwhile */
    uint32_t epoch;    /* tells it from an earlier context of the same handle; never 0 */
    uint32_t attached; /* references that cuCtxAttach took */
};

struct known_stream {
    CUcontext context; /* NULL: a free place */
    CUstream stream;   /* NULL: the default streams of the context; or STREAM_ORPHAN */
    CUevent event;
    bool pending, waiting;
};

struct open_capture {
    CUcontext context;
    CUstream stream; /* where it began, never NULL */
};

struct streams {
    struct lock lock;
    uint32_t epochs;               /* contexts ever noted */
    struct rows contexts;          /* struct known_context */
    struct rows streams;           /* struct known_stream */
    struct rows captures;          /* struct open_capture, without gaps; as many as gate.captures says */
    unsigned swept;                /* the row of `streams` that is looked at next for fences that are over */
    uint32_t hints[STREAMS_HINTS]; /* where a stream may stand in `streams` */
};

static inline struct known_context *streams_context(const struct streams *streams, unsigned index) {
    return (struct known_context *)streams->contexts.rows + index;
}

static inline struct known_stream *streams_stream(const struct streams *streams, unsigned index) {
    return (struct known_stream *)streams->streams.rows + index;
}

static inline struct open_capture *streams_capture(const struct streams *streams, unsigned index) {
    return (struct open_capture *)streams->captures.rows + index;
}

/* Register the stream of that name for a launch that follows; fill the thread's memory of it. Inside a passage. `word`:
 * of the gate. False: no memory (R6). */
bool streams_register(struct streams *streams, struct gate *gate, CUstream stream, uint32_t word,
                      struct slot_stream *entry);
/* Destroy events of the context that has this epoch, unless it has ended: then they went with it (R2). */
void streams_destroy_events(struct streams *streams, CUcontext context, uint32_t epoch, CUevent *events, int count);

/* The rest with the lock of struct streams. */

/* Return the row of a context; NULL: it is not known, or is ending. */
struct known_context *streams_find_context(struct streams *streams, CUcontext context);
/* Return whether the driver is ending a context of that handle. */
bool streams_ending(const struct streams *streams, CUcontext context);
/* Return the row of a context, made if need be; NULL: no memory. */
struct known_context *streams_note_context(struct streams *streams, CUcontext context);
/* Record the event on a stream of the current context. False: a capture forbids it, or the driver refuses. */
bool streams_record(const struct known_stream *known, CUevent event);
/* Put an event behind the unfinished work of the stream in that row, as a row of its own: from then on it can be told
 * without the stream whether that work is over. */
void streams_fence(struct streams *streams, unsigned index);
/* Forget the capture of that row: it is over. */
void streams_forget_capture(struct streams *streams, struct gate *gate, unsigned index);

#endif
