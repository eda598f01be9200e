/* What the files of the double share: contexts, streams, events and the queue of a device. */
#ifndef FAKECUDA_FAKE_H
#define FAKECUDA_FAKE_H

#include <cuda.h>
#include <pthread.h>

#include "state.h"

#ifndef FAKE_CUDA_VERSION
#define FAKE_CUDA_VERSION 13000
#endif

#define EXPORT __attribute__((visibility("default")))

enum { MAGIC_CONTEXT = 0xc0, MAGIC_STREAM, MAGIC_EVENT, MAGIC_MODULE, MAGIC_FUNCTION, MAGIC_GRAPH, MAGIC_EXEC };
enum {
    QUEUE_DEPTH = 1024
}; /* unfinished operations of one stream; a launch beyond them blocks, as the real one does */

struct graph;

struct capture {
    CUstreamCaptureMode mode;
    pthread_t thread;
    struct context *context;
    struct stream *origin;
    struct graph *graph;
    bool invalid;
    struct capture *next;
};

struct stream {
    unsigned magic;
    unsigned flags;
    struct context *context;
    uint64_t submitted, committed, finished; /* operations: accepted, on the timeline, over */
    uint64_t end;                            /* when the last committed one ends */
    struct capture *capture;
    struct stream *next;
};

struct event {
    unsigned magic;
    unsigned flags;
    struct context *context;
    uint64_t recorded, committed; /* records: asked for, on the timeline */
    uint64_t end;
    struct capture *capture; /* last recorded in this capture sequence */
};

struct context {
    unsigned magic;
    int device;
    unsigned flags;
    unsigned references;
    bool alive;
    struct stream legacy, per_thread;
    struct stream *streams;
    struct context *next;
};

enum op_kind { OP_KERNEL, OP_HANG, OP_EVENT, OP_WAIT, OP_FREE };

struct op {
    enum op_kind kind;
    struct stream *stream;
    struct event *event;
    uint64_t generation; /* OP_EVENT, OP_WAIT: which record of the event */
    uint64_t bytes;      /* OP_FREE */
    uint64_t ready, left, end;
};

/* One lock for all of it: a double need not scale. */
extern pthread_mutex_t fake_lock;

uint64_t fake_now(void);
void fake_sleep_until(uint64_t moment);

/* context.c */
CUresult fake_enter(struct context **context); /* initialized, and with a current context */
CUresult fake_initialized(void);
bool fake_is(const void *handle, unsigned magic);
struct stream *fake_stream(struct context *context, CUstream handle, bool per_thread);
void fake_add_stream(struct context *context, struct stream *stream);

/* engine.c; all with fake_lock, which the waits and a full queue let go of */
void fake_submit(struct stream *stream, struct op op);
void fake_wait_stream(struct stream *stream);
void fake_wait_event(struct event *event);
void fake_wait_context(struct context *context);
bool fake_stream_idle(struct stream *stream);
bool fake_event_done(struct event *event);
void fake_engine_forked(void);

/* capture.c; with fake_lock */
CUresult fake_unsafe_call(void);                  /* a call that stream capture may forbid */
CUresult fake_sync_call(struct context *context); /* a call that waits for all of a context */
CUresult fake_stream_sync_call(struct stream *stream);
CUresult fake_order_call(struct stream *stream); /* work put on a stream outside of capture */
CUresult fake_capture_kernel(struct stream *stream, uint64_t duration,
                             bool hang); /* NOT_READY: the stream is not capturing */
void fake_capture_context_gone(struct context *context);

/* launch.c */
CUresult fake_submit_kernel(struct stream *stream, uint64_t duration, bool hang);

#endif
