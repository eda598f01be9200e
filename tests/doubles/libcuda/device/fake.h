/* Common declarations of the double: contexts, streams, events, the queue of a device, stream capture.
 *
 * If CUDA declares a call also in a _ptds or _ptsz form, the sources have only the plain form. The other form is
 * generated: it sets fake_per_thread and calls the plain form. Functions that the sources lack are generated stubs
 * (generate.py).
 */
#ifndef FAKECUDA_FAKE_H
#define FAKECUDA_FAKE_H

#include <cuda.h>
#include <pthread.h>

#include "device/state.h"

#ifndef FAKE_CUDA_VERSION
#define FAKE_CUDA_VERSION CUDA_VERSION
#endif

#define EXPORT __attribute__((visibility("default")))

enum {
    MAGIC_CONTEXT = 0xc0,
    MAGIC_STREAM,
    MAGIC_EVENT,
    MAGIC_MODULE,
    MAGIC_LIBRARY,
    MAGIC_FUNCTION,
    MAGIC_GRAPH,
    MAGIC_NODE,
    MAGIC_EXEC,
    MAGIC_ARRAY,
    MAGIC_MIPMAP,
    MAGIC_POOL,
    MAGIC_PHYSICAL,
    MAGIC_EXTERNAL,
    MAGIC_DEAD /* an event or a stream whose context has ended */
};
/* Most unfinished operations of one stream. A further launch blocks, as on a real driver. */
enum { QUEUE_DEPTH = 1024 };

/* One stream capture. */
struct capture {
    CUstreamCaptureMode mode;
    pthread_t thread;
    struct context *context;
    struct stream *origin;
    struct graph *graph;
    bool owns_graph; /* the graph was created for this capture, and not passed by the program */
    bool invalid, over;
    struct node *recaptured; /* in a recapture of a graph: the existing node that the next recorded node must match */
    bool recaptures;
    CUgraphRecaptureCallback mismatch;
    void *argument;
    struct capture *next;
};

struct stream {
    unsigned magic;
    unsigned flags;
    int priority;
    uint64_t id; /* 0: a default stream */
    struct context *context;
    struct op *ops; /* ring buffer of `room` operations, each at the index of its number modulo `room` */
    size_t room;
    uint64_t submitted, committed, finished; /* number of operations so far: accepted; on the device's timeline (their
                                                end is known); ended */
    uint64_t end;                            /* end of the last committed operation, ns */
    uint64_t served;                         /* number of the engine's turn in which the stream last got the device */
    bool calling;                            /* its next operation is a host function, which is running */
    bool green;                              /* made for a green context */
    unsigned waiting;                        /* number of its unfinished waits and host functions */
    uint64_t thread;                         /* number of the thread whose per-thread default stream it is; 0: another
                                                stream */
    bool listed;                             /* in the engine's list of streams with unfinished work */
    struct stream *listed_next;
    struct capture *capture;
    struct stream *next;
};

/* Number of records of an event whose ends are stored, because a wait may be for an earlier record than the last. */
enum { EVENT_RECORDS = 16 };

struct event {
    unsigned magic;
    unsigned flags;
    struct context *context;
    uint64_t recorded, committed; /* number of records so far: requested; on the timeline */
    uint64_t end;
    uint64_t ends[EVENT_RECORDS]; /* ends of the last records, by number */
    struct capture *capture;      /* the capture sequence in which the event was last recorded */
    struct event *next, **from;   /* next event of the same context; pointer to this event */
};

struct context {
    unsigned magic;
    int device;
    unsigned flags;
    unsigned references;
    uint64_t id; /* unique number: no other context has it, even with the same handle */
    bool alive;
    bool ending; /* the context is being destroyed and waits for its work: no new work is accepted */
    bool green;  /* a green context: its memory belongs to the primary context, if that is alive */
    uint64_t limits[CU_LIMIT_MAX];
    uint64_t charged;           /* device memory that the context itself takes */
    _Atomic uint64_t faults_at; /* ns: time at which a kernel reads an invalid address; 0: none does */
    struct stream legacy;
    struct stream *per_thread; /* default streams of threads that have used them */
    struct stream marks;       /* internal stream for events behind all work of the context (cuCtxRecordEvent) */
    uint64_t blocking_end;     /* end of the committed work of all streams that the legacy stream waits for, ns */
    struct event *events;      /* they end with the context */
    struct stream *streams;
    struct stream *destroyed; /* streams that the program has destroyed, and which may still have work */
    struct context *next;
};

enum op_kind {
    OP_KERNEL, /* occupies the device */
    OP_COPY,   /* occupies the copy engine */
    OP_HANG,
    OP_EVENT,
    OP_WAIT,
    OP_VALUE, /* waits for a word of memory, or writes one */
    OP_HOST,  /* calls a function of the program */
    OP_RETURN /* frees memory */
};

/* A word of memory that a stream waits for or writes. */
struct value {
    CUdeviceptr address;
    uint64_t value;
    unsigned flags; /* CU_STREAM_WAIT_VALUE_ */
    bool wide, writes;
};

struct op {
    enum op_kind kind;
    struct stream *stream;
    struct event *event;
    struct value *value;
    uint64_t generation;  /* of OP_EVENT and OP_WAIT: number of the event's record */
    uint64_t order;       /* number of the operation on its device */
    void (*call)(void *); /* OP_HOST; OP_RETURN: with fake_lock */
    void *argument;
    uint64_t ready, left, end;
    _Atomic uint64_t *meeting; /* of OP_KERNEL: of a collective, see struct work; NULL: the kernel takes `left` ns */
    uint64_t met_at;
    bool arrived; /* the kernel has added 1 */
    bool faults;  /* it reads an invalid address at its end */
    bool writes;  /* of OP_VALUE */
    bool behind;  /* of OP_KERNEL and OP_HANG: submitted while a wait before it in the stream was unfinished */
};

/* Work of a stream, or of a graph's node. */
struct work {
    CUgraphNodeType type;
    bool hang, faults;
    uint64_t device_ns, copy_ns; /* ns on the device; ns of a transfer with host memory, in parallel to the device */
    CUhostFn function;
    void *argument;
    _Atomic uint64_t *meeting; /* of a collective: the kernel adds 1 to this number, and lasts until the number is at
                                  least `met_at` */
    uint64_t met_at;
};

/* The only lock of the double: simple, because tests need no parallel driver calls. */
extern pthread_mutex_t fake_lock;
/* True inside a _ptds or _ptsz form: the default stream is the thread's own. */
extern __thread bool fake_per_thread;

/* entered.c: count a driver call. `locks`: the call takes the driver's lock. Called without fake_lock. */
void fake_entered(bool locks);
/* Return the error that each call gets once a kernel has faulted in the current context: it is sticky. */
CUresult fake_fault(void);
/* Return `result`, or, if it is CUDA_SUCCESS and the context has a fault, that fault. For calls that wait for work or
 * query it. */
CUresult fake_found(CUresult result);

/* context.c */
CUresult fake_enter(struct context **context); /* check that the library is initialized and a context is current */
/* Return the primary context of a device, alive or not. */
CUcontext fake_primary(int device);
CUresult fake_enter_stream(CUstream handle, struct stream **stream);
CUresult fake_initialized(void);
/* Count a call that has a handle of an ended context, or that is made while the library ends. */
void fake_misused(void);
CUresult fake_find_device(CUdevice ordinal, int *device);
int fake_ordinal_of(int device);
bool fake_is(const void *handle, unsigned magic);
void fake_add_stream(struct context *context, struct stream *stream);

/* engine.c; called with fake_lock. A wait, and a full queue, release fake_lock for a time. */
void fake_submit(struct stream *stream, struct op op);
void fake_settle(int device); /* record operations that have ended */
void fake_wait_moved(void);   /* wait until some work has begun or ended */
void fake_engine_forked(void);

/* waits.c; called with fake_lock, except the first two. A wait releases fake_lock for a time. */
uint64_t fake_now(void);
void fake_sleep_until(uint64_t moment);
void fake_wait_stream(struct stream *stream);
void fake_wait_event(struct event *event);
void fake_wait_context(struct context *context);
bool fake_stream_idle(struct stream *stream);
bool fake_event_done(struct event *event);
void fake_stream_grow(struct stream *stream);    /* make room for more operations */
void fake_stream_dropped(struct stream *stream); /* the program has destroyed the stream */

/* calls.c */
void fake_start_thread(void *(*run)(void *));
/* Have the function of a stream's operation called. `returned` is called after it, with fake_lock. Return false if
 * another function is running. Called with fake_lock. */
bool fake_call(struct stream *stream, const struct op *op, void (*returned)(struct stream *stream));
void fake_calls_forked(void);

/* event.c; with fake_lock */
void fake_events_of_context_gone(struct context *context);

/* values.c; with fake_lock. Do what the operation requests. Return false if it must wait. */
bool fake_value(const struct value *value);

/* moments.c; without fake_lock */
enum fake_moment { MOMENT_LAUNCHED, MOMENT_ENDING, MOMENT_ENDED, FAKE_MOMENTS };
void fake_moment(enum fake_moment moment);

/* context.c: wait for the milliseconds in an environment variable. */
void fake_take_time(const char *variable);

/* capture.c; with fake_lock. A check returns an error if a capture forbids the call, and invalidates that capture */
CUresult fake_unsafe_call(void);                       /* check a call that any open capture may forbid */
CUresult fake_sync_call(struct context *context);      /* check a call that waits for all work of a context */
CUresult fake_stream_sync_call(struct stream *stream); /* check a call that waits for a stream */
CUresult fake_order_call(struct stream *stream);       /* check work for a stream that does not capture */
CUresult fake_not_captured(struct stream *stream);     /* check a call that a capturing stream forbids */
void fake_capture_context_gone(struct context *context);

struct node;
/* Add a node to the capture of a stream. On a mismatch during recapture, call the program's callback, without
 * fake_lock. */
CUresult fake_capture_node(struct stream *stream, const struct node *node);

/* launch.c; with fake_lock. Record the work in the stream's capture, or submit it. Work that takes device time counts
 * as a launch. */
CUresult fake_submit_work(struct stream *stream, const struct work *work);
/* Submit work without recording it and without a check for captures. */
void fake_put_work(struct stream *stream, const struct work *work);

/* symbols.c */
int fake_unsupported(const char *symbol);

#endif
