/* The registry of contexts and streams that have work which no one has seen finished.
 *
 * Guarantees: each stream that a launch went into during the present opening of the gate is registered before the
 * launch; a handle that the program destroys is never used by the hook afterwards (destroying takes the registry's
 * lock); no call of the hook disturbs a stream capture of the program.
 */
#ifndef SHAREPOD_STREAMS_H
#define SHAREPOD_STREAMS_H

#include <stdbool.h>
#include <stdint.h>

#include "entries.h"
#include "gate.h"
#include "sys.h"

/* In place of the handle of a stream that the program has destroyed. */
#define STREAM_ORPHAN ((CUstream) ~(uintptr_t)0)

enum { STREAMS_CONTEXTS = 64, STREAMS_MOST = 1024, STREAMS_CAPTURES = 64 };

struct known_context {
    CUcontext context; /* NULL: a free place */
    CUevent event;
    bool pending;      /* launched into since the last drain */
    bool waiting;      /* `event` is recorded and not yet seen complete */
    uint32_t born;     /* tells it from an earlier context of the same handle; never 0 */
    uint32_t attached; /* references that cuCtxAttach took */
};

struct known_stream {
    CUcontext context; /* NULL: a free place */
    CUstream stream;   /* NULL: the default streams of the context; STREAM_ORPHAN: destroyed, its last work is behind
                          `event` */
    CUevent event;
    bool pending, waiting;
};

struct streams {
    struct lock lock;
    uint32_t births; /* contexts ever noted */
    struct known_context contexts[STREAMS_CONTEXTS];
    struct known_stream streams[STREAMS_MOST];
    unsigned context_count, stream_count; /* places ever used */
    struct {
        CUcontext context;
        CUstream stream; /* never NULL */
    } captures[STREAMS_CAPTURES]; /* where an open capture began; as many as gate.captures says */
};

/* NULL, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD mean a stream of the current context. */
static inline bool streams_default(CUstream stream) {
    return (uintptr_t)stream <= 2;
}

/* Notes that a launch into the stream follows; fills the thread's memory of it. Inside a passage. */
void streams_register(struct streams *streams, CUstream stream, bool per_thread, uint32_t word,
                      struct slot_stream *entry);
bool streams_is_capturing(CUstream stream, bool per_thread);

/* For a call of the hook's own in a thread of the program: stream capture shall not see it. */
CUstreamCaptureMode streams_hide(void);
void streams_unhide(CUstreamCaptureMode mode);

/* An event for the hook's fences in that context; NULL if the driver makes none. */
CUevent streams_make_event(CUcontext context);

/* drain.c. Begins: events behind all registered work. Poll: whether all of it has finished. End: nothing is registered
 * any more. */
void drain_begin(struct streams *streams);
bool drain_poll(struct streams *streams);
void drain_end(struct streams *streams);

#endif
