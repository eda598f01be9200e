/* Registry of the program's GPU work: contexts and streams whose work may be unfinished, the queue of each thread on
 * each stream, and open stream captures.
 *
 * Guarantees:
 * - R1 If a launch went into a stream during the present opening, the stream was registered before that launch
 *   (P2, passage.h).
 * - R2 The hook never uses a handle after the program has destroyed the stream or context. A new stream with the same
 *   handle is another stream, for every thread. Other streams stay registered.
 * - R3 No call of the hook disturbs a stream capture of the program.
 * - R4 The hook holds no lock while the driver destroys a stream or a context, or calls the program back.
 * - R5 Before a stream begins or joins a capture, the hook records an event behind the stream's earlier work, as a row
 *   with STREAM_ORPHAN. If the legacy stream waits for the capturing stream, the hook does the same for the legacy
 *   stream.
 * - R6 Only memory limits the number of contexts, streams and captures. Without memory the hook refuses the launch or
 *   the capture with CUDA_ERROR_OUT_OF_MEMORY.
 * - R7 Each thread has its own queue on each stream that it launches into under a metered grant.
 * - R8 Finding a stream or a queue takes the same time for any number of streams and queues.
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

/* Value of `stream` in a row whose stream was destroyed or may capture, so that the hook must not use it. The row's
 * event shows the end of its work. */
#define STREAM_ORPHAN ((CUstream) ~(uintptr_t)0)

/* A function of the program that a stream calls. The functions of a context may run one after another, so the
 * function may begin long after the stream has reached it. */
struct host_call {
    CUhostFn function;
    CUstreamCallback callback; /* instead of `function`; NULL: none */
    void *argument;
    struct host_call *next; /* in the list of calls to free */
    _Atomic bool begun;
    _Atomic uint32_t over; /* CALL_RETURNED, CALL_FORGOTTEN */
};

/* Bits of `over`: the function has returned or will not be called; the entry of the wait has been removed. Whichever
 * thread sets the second bit frees the call. */
enum { CALL_RETURNED = 1, CALL_FORGOTTEN = 2 };

/* A wait that the program has put into a stream. Work behind it does not run before it has passed. */
struct program_wait {
    struct program_wait *next;
    struct host_call *call; /* the function that the stream waits for; NULL: the stream waits for something else */
    CUevent before;         /* event between the wait and earlier launches that no fence covers; see `fences` */
    CUevent behind;         /* event before the first launch behind the wait, unless the wait is for a function */
    bool fences; /* earlier launches without a fence exist; `before` is recorded behind them once `fenced` is set */
    bool fenced;
    bool unseen;       /* earlier launches without a fence exist, and no event could be recorded behind them */
    bool marked;       /* `behind` is recorded */
    uint64_t number;   /* number of waits of the program up to this one */
    uint64_t launched; /* number of launches into the stream before the wait */
    int thread;        /* thread that put the wait, or that records `behind` as the first to launch behind the wait */
    uint64_t others;   /* number of launches into the stream by other threads, when `thread` was set */
    bool crossed; /* the row has no queues any more, and launches of other threads may be on either side of the wait */
};

/* Most events of the hook, behind waits of the program, in a stream that has room for 1,024 operations. */
enum { WAIT_PLACES = 128 };
/* Most unfinished rows with STREAM_ORPHAN of a context whose events are behind all its work: the driver's list of such
 * events may have no more room than a stream. */
enum { ORPHANS_MOST = 512 };
/* Whether a stream and the legacy stream wait for each other. */
enum { FLAGS_UNKNOWN, FLAGS_BLOCKING, FLAGS_NON_BLOCKING };

struct known_context {
    struct known_context *next;
    struct program_wait *spare;   /* entries with events that are not in use */
    struct known_stream *streams; /* rows of its streams */
    CUcontext context;            /* NULL: this entry is free */
    uint32_t epoch;  /* number of the context, never 0: another context with the same handle has another epoch */
    uint32_t ending; /* number of the end under way; 0: none. While not 0, no handle of the context may be used */
    /* 0: no end was under way when this row was made. Else number of that end, which concerned another context with the
     * same handle. Only after that end is it known which of the two contexts runs the work of this row's streams */
    uint32_t amid;
    uint32_t attached; /* references that cuCtxAttach took */
    uint32_t orphans;  /* number of its rows with STREAM_ORPHAN */
    bool for_end;      /* this row was made because its context is about to end */
    bool held;         /* the program has put a wait into all of its streams */
};

/* Return whether this context, or another context with its handle, is ending. Until that end is over, the handle may
 * refer to either context, so the hook makes no driver call with it. */
static inline bool context_unsettled(const struct known_context *known) {
    return known->ending != 0 || known->amid != 0;
}

struct known_stream {
    struct hash_link link; /* first member; not used in a row with STREAM_ORPHAN */
    struct known_context *context;
    CUstream stream; /* NULL: the default streams of the context; or STREAM_ORPHAN */
    CUevent event;
    struct queue *queues; /* queues of threads on the stream */
    bool pending;         /* a launch went into the stream after the last drain */
    bool unmetered; /* a launch after the last drain came from a thread without a queue on the stream: only `event`
                       shows when it has finished */
    bool waiting;   /* `event` is recorded, and no check has seen it complete */
    /* the drain queries the stream, and no query has found it idle. For default streams, the queried stream is the
     * legacy stream */
    bool asked;
    /* The drain cannot see yet when the work ends, and waits until it can: work in per-thread default streams, or of a
     * stream that was destroyed next to an open capture. */
    bool unseen;
    bool skipped; /* a drain began while its context was ending */
    bool busy;    /* the row is in the list of rows with work */
    bool held;    /* the program has put a wait into the stream, or into a stream that the stream waits for, and no
                     query has found the stream idle since */
    struct program_wait *waits, *last_wait; /* waits of the program that no look has found passed, in order. A stream
                                               that is no default stream has such entries */
    struct program_wait
        *unmarked; /* the wait of `waits`, not for a function, behind which nothing was launched; NULL: none */
    uint64_t launched_before; /* number of launches of all its queues before `last_wait` */
    uint32_t places;          /* number of events of these waits that may be in the stream */
    bool crowded;             /* a thread has waited unsuccessfully for room for such events */
    uint64_t number;          /* in a row with STREAM_ORPHAN: number of waits of the program before `event` */
    bool left;                /* the last drain has left launches behind these waits */
    bool covering;            /* a thread records `event` without the lock */
    uint8_t flags;            /* FLAGS_UNKNOWN, FLAGS_BLOCKING or FLAGS_NON_BLOCKING */
    uint32_t round;           /* number of the last call of drain_before_ungated_context that has seen the row */
    bool blind; /* the stream may capture, and no event is behind its earlier work: its end is seen only after the
                   capture */
    /* number of launches, of all its queues, after which a sample or a drain found the stream idle */
    uint64_t idle_after;
    struct known_stream *busy_next, **busy_from;
    struct known_stream *next, **from; /* rows of the same context */
};

/* Bounded queue of one thread on one stream. Only that thread uses it, except where noted. */
struct queue {
    struct hash_link link; /* first member. Only the registry uses this and the members down to `ended` */
    struct slot *slot;     /* slot of the thread */
    struct known_stream *row;
    uint32_t epoch; /* epoch of the context: the events end with that context */
    struct queue *stream_next, **stream_from;
    struct queue *slot_next, **slot_from;
    bool awaited;      /* the drain waits for the event `last` */
    uint64_t inside;   /* `sequence` of its slot at the last sample, if the thread was inside a launch then; else 0 */
    uint64_t covered;  /* number of launches that are before the row's event */
    uint64_t covering; /* number of launches before the event that a thread records while the row's `covering` is set */
    _Atomic bool ended;   /* its stream or context has ended: the queue must not be used any more */
    _Atomic bool departs; /* its context is ending or about to end */
    _Atomic bool calls;   /* its thread is in a driver call that uses the stream or the events of this queue */
    CUevent events[PACE_FENCES], tail;
    uint64_t places[PACE_FENCES];            /* number of launches before each of `events` */
    uint64_t passed;                         /* number of launches before the last event that has passed */
    _Atomic uint64_t held_after, held_again; /* number of launches before the first and before the last wait of the
                                                program that no fence has passed; NOT_HELD: there is no such wait.
                                                Written by any thread that puts a wait into the stream */
    _Atomic bool held_long;                  /* the meter has waited unsuccessfully for a fence behind such a wait */
    struct program_wait *mark;               /* wait whose event `behind` the thread must record before its launch */
    /* The members that each launch reads and writes, in one cache line. The hook thread reads `last`, `launched` and
     * `fenced`. */
    CUstream stream __attribute__((aligned(64))); /* the stream's name, see stream_named */
    CUcontext context;
    _Atomic uint32_t word; /* gate word under which the queue was registered; 0: the next launch registers it again. Set
                              with the registry's lock; its thread may set 0 without the lock */
    uint32_t opening;      /* the gate's `next_closing` when the queue was last used */
    _Atomic uint64_t launched; /* number of launches so far, counted inside the passage */
    uint64_t due;              /* number of the launch after which `pace` gets the next report */
    uint64_t reported;         /* number of launches reported to `pace` */
    _Atomic uint64_t fenced;   /* number of launches before the event `last` */
    _Atomic(CUevent) last;     /* event that was recorded last */
    struct pace pace;          /* model that decides which launches pass, and which fences to wait for */
};

/* An open capture, or a call under way that may make its stream join a capture. */
struct open_capture {
    CUcontext context;
    CUstream stream; /* stream in which the capture began, or stream that may join another capture; never NULL */
    bool joins;      /* the stream may join a capture; such an entry exists only during the call */
    bool blocks;     /* the legacy stream waits for work of this stream */
};

/* Primary context of a device, by the program's calls. */
struct primary {
    CUcontext context;         /* handle at the last retain; NULL: not known */
    unsigned long long number; /* number of the context, see context_number */
    CUcontext before;          /* last known handle: the next primary context may have the same one */
    uint32_t retained;         /* references not released, as far as the hook has seen calls: a lower bound */
};

/* STREAMS_DEVICES: number of devices whose primary contexts are counted. No machine has more. */
enum { STREAMS_DEVICES = 128 };

#define NOT_HELD UINT64_MAX

/* Call this before a driver call that uses the queue's stream or events, in the queue's thread. Return true if the
 * stream and events may be used; streams_called must then follow the driver call. Return false if they have ended, or
 * if their context is about to end (R2). */
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
    uint32_t epochs; /* number of contexts registered so far */
    uint32_t ends;   /* number of context ends begun so far */
    uint32_t rounds; /* number of calls of drain_before_ungated_context */
    struct slab context_rows, stream_rows, queue_rows, wait_rows, call_rows;
    struct known_context *contexts;
    _Atomic(struct host_call *) returned; /* calls that are to be freed with the lock */
    struct hashed streams;                /* struct known_stream, except rows with STREAM_ORPHAN */
    struct hashed queues;                 /* struct queue */
    struct known_stream *busy, *orphans;
    _Atomic bool holds; /* the program has put a wait into a stream whose end the hook does not see: for a value, a
                           semaphore, or a function without an entry */
    /* number of the program's functions in streams that have an entry and have not returned */
    _Atomic uint32_t functions;
    _Atomic uint32_t holding; /* number of calls under way between waits_hold and waits_held */
    uint64_t noted;           /* number of waits of the program so far */
    struct rows captures;     /* array of struct open_capture, without gaps; gate.captures is its length */
    struct lock primaries_lock;
    struct primary primaries[STREAMS_DEVICES]; /* guarded by primaries_lock */
};

static inline struct open_capture *streams_capture(const struct streams *streams, unsigned index) {
    return (struct open_capture *)streams->captures.rows + index;
}

/* Register the stream with this name before a launch into it, and store the thread's queue on it in `*queue`. Call this
 * inside a passage. `word`: the gate word. `slot`: the thread's slot, or NULL if it has none. `*queue` NULL: launches
 * into the stream are not counted. Return false if there is no memory (R6). */
bool streams_register(struct streams *streams, struct gate *gate, struct slot *slot, CUstream stream, uint32_t word,
                      struct queue **queue);
/* Destroy events of the context with this epoch. If that context has ended, its events ended with it, and this only
 * clears `events` (R2). */
void streams_destroy_events(struct streams *streams, CUcontext context, uint32_t epoch, CUevent *events, int count);
/* Return the epoch of a context, registered if necessary. Return 0 if there is no memory, or if the context is ending.
 */
uint32_t streams_epoch(struct streams *streams, CUcontext context);
/* Return true, and destroy the event, if the event has passed or the context with this epoch has ended. Else return
 * false. */
bool streams_event_over(struct streams *streams, CUcontext context, uint32_t epoch, CUevent event);
/* Return the queue of the slot's thread on the stream with this name in this context; NULL: there is none. `context`
 * NULL: search all contexts. A default stream needs a context, unless only one context exists. */
struct queue *streams_queue(struct streams *streams, const struct slot *slot, CUstream stream, CUcontext context);
/* Drop all queues of a slot whose thread has exited. */
void streams_abandon(struct streams *streams, struct slot *slot);

/* Record that the program has created a context. If another context with the same handle is ending, the new context
 * gets a row of its own. */
void streams_born(struct streams *streams, CUcontext context);

/* Count a reference to the primary context of a device. */
void streams_retained(struct streams *streams, CUdevice device, CUcontext context);

/* Callers of the following functions hold the lock of struct streams. */

/* Return whether each launch of threads with a queue is before a fence of its thread, or before the event of the row.
 */
bool streams_covered(const struct known_stream *row);
/* Return the number of launches into the stream by threads with a queue on it. */
uint64_t streams_launched(const struct known_stream *row);
/* Return the row's oldest wait that has not passed; NULL: there is none. Remove passed waits. */
struct program_wait *streams_oldest_wait(struct streams *streams, struct known_stream *row);
/* Return whether threads other than `wait->thread` may have launched between the wait and its events. */
bool streams_crossed(const struct known_stream *row, const struct program_wait *wait);
/* Record that no wait of the program is left in the row's stream. For a row of default streams this concerns the legacy
 * stream: streams without work of their own may wait for it. */
void streams_note_idle(struct streams *streams, struct known_stream *row);
/* Return the row of a context; NULL: the context is not registered, or is ending. */
struct known_context *streams_find_context(struct streams *streams, CUcontext context);
/* Return whether the context with this epoch is registered and is not ending. */
bool streams_lives(struct streams *streams, CUcontext context, uint32_t epoch);
/* Return the row of a context, created if necessary; NULL: no memory. */
struct known_context *streams_note_context(struct streams *streams, CUcontext context);
/* Return the row of a stream of this context; NULL: the stream is not registered. */
struct known_stream *streams_find(struct streams *streams, const struct known_context *context, CUstream stream);
/* Add a row without looking for another row of this stream. Return NULL if there is no memory. */
struct known_stream *streams_add_row(struct streams *streams, struct known_context *context, CUstream stream);
/* Return the row of a stream, created if necessary; NULL: no memory. */
struct known_stream *streams_note(struct streams *streams, struct known_context *context, CUstream stream);
/* Return whether the context is current and has ended. The driver then refuses the launch. */
bool streams_current_ended(CUcontext context);
/* Return whether the row's stream has no unfinished work. The stream is no default stream, and its context is current.
 */
bool streams_idle(const struct streams *streams, const struct known_stream *row);
/* Return the number of launches into the row's stream by all threads but one. */
uint64_t streams_launched_by_others(const struct known_stream *row, int thread);
/* Record whether the row has work. */
void streams_set_busy(struct streams *streams, struct known_stream *row, bool busy);
/* Record the event in the row's stream. Return false if the driver refuses, or if a capture forbids the call. The
 * capture may be open, or may begin during the call. */
bool streams_record(const struct streams *streams, const struct known_stream *row, CUevent event);
/* Return whether no capture forbids an event in the row's stream, which is no default stream. */
bool streams_may_record(const struct streams *streams, const struct known_stream *row);
/* Return whether the row's stream and the legacy stream wait for each other, as far as the driver reports it. */
bool streams_blocking(struct known_stream *row);
/* Return whether an event can be recorded behind all work of a context: the driver has cuCtxRecordEvent, and no capture
 * is open. */
bool streams_records_context(const struct streams *streams);
/* Return whether an event for the row could only be recorded in the stream, and might wait there for room behind a wait
 * of the program. */
bool streams_may_block(const struct streams *streams, const struct known_stream *row);
/* Record the event behind all work of the row's context. Unlike streams_record, this does not wait for room in a
 * stream. Return false if the event cannot be recorded. */
bool streams_record_context(const struct streams *streams, const struct known_stream *row, CUevent event);
/* Query the driver about this stream of the row, whose context is current. Return the driver's answer;
 * CUDA_ERROR_NOT_READY: the stream has unfinished work. Return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED without a query if
 * a capture forbids it that is open or may begin. */
CUresult streams_query(const struct streams *streams, const struct known_stream *row, CUstream stream);
/* Make each thread register the streams of the context again. While `departs` is true, no thread uses its queue on
 * them. */
void streams_depart(struct known_context *known, bool departs);
/* Return whether a thread is in a driver call with a queue of the context. Once this is false after
 * streams_depart(known, true), it stays false. */
bool streams_in_call(const struct known_context *known);
/* Remove a row and its queues. `events`: also destroy the row's event. Pass false if the event has ended with its
 * context. */
void streams_forget(struct streams *streams, struct known_stream *row, bool events);
/* Remove a context, the rows of its streams, and their queues. */
void streams_forget_context(struct streams *streams, struct known_context *known);

#endif
