/* The registry of contexts and streams whose work is not known to have finished, of the threads' queues on them, and of
 * open captures.
 *
 * Guarantees:
 * - R1 each stream that a launch went into during the present opening is registered before the launch (P2);
 * - R2 the hook never uses a handle after the program destroyed it. A new stream with the same handle is another
 *   stream, for every thread. Other streams stay registered;
 * - R3 no call of the hook disturbs a stream capture of the program;
 * - R4 the hook holds no lock while the driver destroys a stream or a context, or calls the program back;
 * - R5 work that a stream ran before it began or joined a capture is behind an event (a row with STREAM_ORPHAN). The
 *   same holds for work of the legacy stream, if it waits for that stream;
 * - R6 the number of contexts, streams and captures is limited only by memory. Without memory the launch or the capture
 *   is refused with CUDA_ERROR_OUT_OF_MEMORY;
 * - R7 each thread has its own queue on each stream that it launches into under a metered grant;
 * - R8 finding a stream or a queue takes the same time for any number of them.
 */
#ifndef SHAREPOD_STREAMS_H
#define SHAREPOD_STREAMS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/hashed.h"
#include "base/rows.h"
#include "base/slab.h"
#include "base/sys.h"
#include "driver/entries.h"
#include "driver/own_calls.h"
#include "time/gate/gate.h"
#include "time/queue/pace.h"

/* Stands for a stream that is not to be touched any more: its last work is behind an event. */
#define STREAM_ORPHAN ((CUstream) ~(uintptr_t)0)

struct known_context {
    struct known_context *next;
    struct known_stream *streams; /* its rows */
    CUcontext context;            /* NULL: a free place */
    uint32_t epoch;               /* differs from that of an earlier context of the same handle; never 0 */
    uint32_t ending;              /* the driver is destroying it, or about to: its handles are not to be used; which end
                                     that is, else 0 */
    uint32_t amid; /* it was noted while a context of the same handle was ending: which end; else 0. Which of the two
                      the work of its rows is in shows when that end is over */
    uint32_t attached; /* references that cuCtxAttach took */
    bool for_end;      /* nothing was known of it before its end */
    bool held;         /* the program has put a wait into all of its streams */
};

/* Return whether the hook makes no call about a context for now: an end is under way, after which it is known of which
 * context the handles are. */
static inline bool context_unsettled(const struct known_context *known) {
    return known->ending != 0 || known->amid != 0;
}

struct known_stream {
    struct hash_link link; /* first; unused by an orphan */
    struct known_context *context;
    CUstream stream; /* NULL: the default streams of the context; or STREAM_ORPHAN */
    CUevent event;
    struct queue *queues; /* of threads */
    bool pending;         /* launched into since the last drain */
    bool unmetered;       /* by a thread without a queue on it: only an event of its own shows the end */
    bool waiting;         /* `event` is recorded and not yet seen complete */
    bool asked;   /* the drain asks the stream itself, of default streams the legacy one, and has not seen it idle */
    bool unseen;  /* the drain waits until the end of per-thread default streams is known */
    bool skipped; /* a drain began while its context was ending */
    bool busy;    /* in the list of rows with work */
    bool held;    /* the program has put a wait into it, or into a stream that it waits for */
    uint64_t idle_after; /* launches of all its queues after which a sample saw it idle */
    struct known_stream *busy_next, **busy_from;
    struct known_stream *next, **from; /* of the same context */
};

/* The bounded queue of one thread on one stream. Used only by that thread, except for marked fields. */
struct queue {
    struct hash_link link; /* first; the registry's, as all down to `ended` */
    struct slot *slot;     /* of the thread */
    struct known_stream *row;
    uint32_t epoch; /* which context of its handle: the events go with it */
    struct queue *stream_next, **stream_from;
    struct queue *slot_next, **slot_from;
    bool awaited;         /* the drain waits for `last` */
    uint64_t inside;      /* its slot's sequence at the last sample, if its thread was inside a launch then */
    uint64_t covered;     /* launches behind the event of the row */
    _Atomic bool ended;   /* its stream or context has ended: not to be used any more */
    _Atomic bool departs; /* its context is ending, or about to */
    _Atomic bool calls;   /* its thread is in a call of the driver with its stream or its events */
    CUevent events[PACE_FENCES], tail;
    uint64_t places[PACE_FENCES];            /* launches before each of `events` */
    uint64_t passed;                         /* launches before the last of them that has passed */
    _Atomic uint64_t held_after, held_again; /* launches before the first and the last wait that no fence has passed;
                                                NOT_HELD: there is none. By any thread that puts one into the stream */
    bool held_long;                          /* a fence behind such a wait was waited for in vain */
    /* What each launch reads and writes, in one cache line; `last`, `launched`, `fenced` are read by the hook thread.
     */
    CUstream stream __attribute__((aligned(64))); /* by its one name, see stream_named */
    CUcontext context;
    _Atomic uint32_t word; /* of the gate, when it was registered; 0: to be registered again with the next launch. With
                              the lock, but 0 by the thread itself */
    uint32_t opening;      /* the gate's next closing, when it was last used */
    _Atomic uint64_t launched; /* launches ever; counted inside the passage */
    uint64_t due;              /* the launch after which `pace` gets the next report */
    uint64_t told;             /* launches reported to it */
    _Atomic uint64_t fenced;   /* launches behind `last` */
    _Atomic(CUevent) last;     /* the event that was recorded last */
    struct pace pace;          /* the model: which launches pass, and which fences to wait for */
};

/* A capture that is open, or a call under way that may have its stream capture. */
struct open_capture {
    CUcontext context;
    CUstream stream; /* the stream where it began, or one that may join another; never NULL */
    bool joins;      /* the stream may join a capture: noted during that call only */
    bool blocks;     /* the legacy stream would wait for the stream */
};

/* The primary context of a device, by the program's calls. */
struct primary {
    CUcontext context;         /* as of the last retain; NULL: not known */
    unsigned long long number; /* its, see context_number */
    CUcontext before;          /* the last known context: the next one may have its handle */
    uint32_t retained;         /* references that are not released, as far as the hook has seen calls: a lower bound */
};

/* STREAMS_DEVICES: devices whose primary contexts are counted, more than a machine has. */
enum { STREAMS_DEVICES = 128 };

#define NOT_HELD UINT64_MAX

/* Begin a driver call with the stream or the events of the queue, in its thread; streams_called must follow. False:
 * they have ended, or their context is about to (R2). */
static inline bool streams_call(struct queue *queue) {
    atomic_store(&queue->calls, true);
    if (!atomic_load(&queue->ended) && !atomic_load(&queue->departs))
        return true;
    atomic_store_explicit(&queue->calls, false, memory_order_release);
    return false;
}

static inline void streams_called(struct queue *queue) {
    atomic_store_explicit(&queue->calls, false, memory_order_release);
}

struct streams {
    struct lock lock;
    uint32_t epochs; /* contexts ever noted */
    uint32_t ends;   /* ends of contexts ever begun */
    struct slab context_rows, stream_rows, queue_rows;
    struct known_context *contexts;
    struct hashed streams; /* struct known_stream, except orphans */
    struct hashed queues;  /* struct queue */
    struct known_stream *busy, *orphans;
    _Atomic bool holds;   /* the program has put a wait that is no event's into a stream */
    struct rows captures; /* struct open_capture, without gaps; gate.captures is their number */
    struct lock primaries_lock;
    struct primary primaries[STREAMS_DEVICES]; /* with their lock */
};

static inline struct open_capture *streams_capture(const struct streams *streams, unsigned index) {
    return (struct open_capture *)streams->captures.rows + index;
}

/* Register the stream of that name for a launch that follows, and remember the thread's queue on it. Inside a passage.
 * `word`: of the gate. `slot`: NULL: the thread has none. `queue`: NULL: launches are not counted. False: no memory
 * (R6). */
bool streams_register(struct streams *streams, struct gate *gate, struct slot *slot, CUstream stream, uint32_t word,
                      struct queue **queue);
/* Destroy events of the context that has this epoch, unless it has ended: then they went with it (R2). */
void streams_destroy_events(struct streams *streams, CUcontext context, uint32_t epoch, CUevent *events, int count);
/* Return the epoch of a context, which differs from that of another context with its handle; 0: no memory, or it is
 * ending. */
uint32_t streams_epoch(struct streams *streams, CUcontext context);
/* Return whether an event of the context that has this epoch has passed, and destroy it, or the context has ended. */
bool streams_event_over(struct streams *streams, CUcontext context, uint32_t epoch, CUevent event);
/* Return the queue of the slot's thread on the stream of that name, of that context. `context` NULL: any context, for a
 * stream that is no default one, or the only context. NULL: none. */
struct queue *streams_queue(struct streams *streams, const struct slot *slot, CUstream stream, CUcontext context);
/* Drop the queues of a slot whose thread has exited. */
void streams_abandon(struct streams *streams, struct slot *slot);

/* Record that the program puts a wait into the stream of that name, of that context (NULL: any context that has it, or
 * the current one). Fences behind the wait may not pass before this thread makes another call. A wait in the legacy
 * stream delays all streams of the context. */
void streams_hold(struct streams *streams, CUstream stream, CUcontext context);

/* Note that the program has made a context: it is another one than that of the same handle, if that one is ending. */
void streams_born(struct streams *streams, CUcontext context);

/* Count a reference to the primary context of a device. */
void streams_retained(struct streams *streams, CUdevice device, CUcontext context);

/* Note that the stream of that name may join a capture with the call that follows, and put an event behind its
 * unfinished work (R5); streams_joined is to follow the call. False: no memory (R6). */
bool streams_join(struct streams *streams, struct gate *gate, CUstream stream);
void streams_joined(struct streams *streams, struct gate *gate, CUstream stream);

/* The rest with the lock of struct streams. */

/* Return the row of a context; NULL: it is not known, or is ending. */
struct known_context *streams_find_context(struct streams *streams, CUcontext context);
/* Return whether the context that has this epoch is there, and is not ending. */
bool streams_lives(struct streams *streams, CUcontext context, uint32_t epoch);
/* Return the row of a context, made if need be; NULL: no memory. */
struct known_context *streams_note_context(struct streams *streams, CUcontext context);
/* Return the row of a stream of that context; NULL: it is not known. */
struct known_stream *streams_find(struct streams *streams, const struct known_context *context, CUstream stream);
/* Note that the row has work, or that it has none. */
void streams_set_busy(struct streams *streams, struct known_stream *row, bool busy);
/* Note a capture, or a stream that may join one; the driver is called afterwards. False: no memory (R6). */
bool streams_note_capture(struct streams *streams, struct gate *gate, const struct open_capture *capture);
/* Record the event on a stream. With the lock. False: a capture that is open or may begin in between forbids it, or the
 * driver refuses. */
bool streams_record(const struct streams *streams, const struct known_stream *row, CUevent event);
/* Return whether an event can be recorded behind all work of a context: the driver can, and no capture is open. */
bool streams_records_context(const struct streams *streams);
/* Record the event behind all work of the row's context, which needs no room in a stream. With the lock. False: it
 * cannot be recorded. */
bool streams_record_context(const struct streams *streams, const struct known_stream *row, CUevent event);
/* Ask the driver about that stream of the row, of the current context: CUDA_ERROR_NOT_READY: it has unfinished work;
 * CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: a capture that is open or may begin forbids the question. */
CUresult streams_query(const struct streams *streams, const struct known_stream *row, CUstream stream);
/* Put an event behind the unfinished work of the row, as a row of its own: from then on the end of that work is known
 * without the stream. A stream that is about to be destroyed (`leaves`), or has a wait of the program, may be full, and
 * perhaps only this thread can end that wait. So nothing is put into it if the driver can do without. */
void streams_fence(struct streams *streams, struct known_stream *row, bool leaves);
/* Make each thread register the streams of the context again, and use no queue of it while it `departs`. */
void streams_depart(struct known_context *known, bool departs);
/* Return whether a thread is in a call of the driver with a queue of the context. None is and none will be, once this
 * is false after streams_depart. */
bool streams_in_call(const struct known_context *known);
/* Forget a row and its queues. `events`: destroy its event, which else went with the context. */
void streams_forget(struct streams *streams, struct known_stream *row, bool events);
/* Forget a context, its rows and their queues. */
void streams_forget_context(struct streams *streams, struct known_context *known);
/* Forget the capture of that row: it is over. */
void streams_forget_capture(struct streams *streams, struct gate *gate, unsigned index);

#endif
