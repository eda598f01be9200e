/* Common declarations of the double: contexts, streams, events, the queue of a device, stream capture.
 *
 * Every call that CUDA declares in a _ptds or _ptsz form has one function here; the other form is generated and sets
 * fake_per_thread around it. Every function that is not written here is a generated stub (generate.py).
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
/* Unfinished operations that one stream holds; a launch beyond them blocks, as on a real driver. */
enum { QUEUE_DEPTH = 1024 };

/* One stream capture. */
struct capture {
    CUstreamCaptureMode mode;
    pthread_t thread;
    struct context *context;
    struct stream *origin;
    struct graph *graph;
    bool owns_graph; /* the graph was made for this capture, not given to it */
    bool invalid, over;
    struct node *recaptured; /* recapture of an existing graph: the node that the next one has to equal */
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
    struct op *ops; /* a ring of `room`; an operation stands at its number modulo that */
    size_t room;
    uint64_t submitted, committed, finished; /* operations: accepted, on the timeline, over */
    uint64_t end;                            /* end of the last committed operation, ns */
    uint64_t served;                         /* the turn in which it last had the device */
    bool calling;                            /* its next operation is a function of the program, which runs */
    bool green;                              /* made for a green context */
    uint64_t thread;                         /* whose default stream it is; 0: of no thread */
    bool listed;                             /* in the engine's list of streams with unfinished work */
    struct stream *listed_next;
    struct capture *capture;
    struct stream *next;
};

/* Records of an event that are remembered: a wait may be for one that is not the last. */
enum { EVENT_RECORDS = 16 };

struct event {
    unsigned magic;
    unsigned flags;
    struct context *context;
    uint64_t recorded, committed; /* records: asked for, on the timeline */
    uint64_t end;
    uint64_t ends[EVENT_RECORDS]; /* of the last records, by number */
    struct capture *capture;      /* last recorded in this capture sequence */
    struct event *next, **from;   /* of the same context; what points to this one */
};

struct context {
    unsigned magic;
    int device;
    unsigned flags;
    unsigned references;
    uint64_t id; /* never another context's, of whatever handle */
    bool alive;
    bool ending; /* its end waits for its work: nothing new is put into it */
    bool green;  /* its memory is the primary context's, if there is one */
    uint64_t limits[CU_LIMIT_MAX];
    uint64_t charged;           /* device memory that the context itself takes */
    _Atomic uint64_t faults_at; /* ns: when a kernel reads memory that is none; 0: none has */
    struct stream legacy;
    struct stream *per_thread; /* default streams of the threads that have used theirs */
    struct stream marks;       /* events behind all of the context's work */
    uint64_t blocking_end;     /* end of the committed work of all streams that the legacy stream waits for, ns */
    struct event *events;      /* die with the context */
    struct stream *streams;
    struct stream *destroyed; /* streams that the program has destroyed; they may still have work */
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
    OP_RETURN /* gives memory back */
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
    uint64_t generation;  /* OP_EVENT, OP_WAIT: number of the event's record */
    uint64_t order;       /* number among the operations of the device */
    void (*call)(void *); /* OP_HOST; OP_RETURN: with fake_lock */
    void *argument;
    uint64_t ready, left, end;
    _Atomic uint64_t *meeting; /* OP_KERNEL: as of struct work; NULL: it lasts as long as is left */
    uint64_t met_at;
    bool arrived; /* it has added 1 */
    bool faults;  /* it reads memory that is none, at its end */
};

/* Work of a stream, or of a graph's node. */
struct work {
    CUgraphNodeType type;
    bool hang, faults;
    uint64_t device_ns, copy_ns; /* time on the device; time of a transfer beside it */
    CUhostFn function;
    void *argument;
    _Atomic uint64_t *meeting; /* a kernel that lasts until this number is `met_at` at least, and adds 1 to it */
    uint64_t met_at;
};

/* The one lock of the double, which need not scale. */
extern pthread_mutex_t fake_lock;
/* True inside a _ptds or _ptsz form: the default stream is the thread's own. */
extern __thread bool fake_per_thread;

/* entered.c: count a call of the driver; `locks`: it takes the driver's lock. Without fake_lock. */
void fake_entered(bool locks);
/* Return the error that each call gets once a kernel has faulted in the current context: it is sticky. */
CUresult fake_fault(void);
/* Return the result of a call that finds faults, or the fault. */
CUresult fake_found(CUresult result);

/* context.c */
CUresult fake_enter(struct context **context); /* initialized, and with a current context */
/* Return the primary context of a device, alive or not. */
CUcontext fake_primary(int device);
CUresult fake_enter_stream(CUstream handle, struct stream **stream);
CUresult fake_initialized(void);
/* Count a call with a handle whose context has ended, or made while the library ends. */
void fake_misused(void);
CUresult fake_find_device(CUdevice ordinal, int *device);
int fake_ordinal_of(int device);
bool fake_is(const void *handle, unsigned magic);
void fake_add_stream(struct context *context, struct stream *stream);

/* engine.c; all with fake_lock, which a wait and a full queue let go of */
void fake_submit(struct stream *stream, struct op op);
void fake_settle(int device); /* takes note of what is over */
void fake_wait_moved(void);   /* waits until some work has begun or is over */
void fake_engine_forked(void);

/* waits.c; all but the first two with fake_lock, which the waits let go of */
uint64_t fake_now(void);
void fake_sleep_until(uint64_t moment);
void fake_wait_stream(struct stream *stream);
void fake_wait_event(struct event *event);
void fake_wait_context(struct context *context);
bool fake_stream_idle(struct stream *stream);
bool fake_event_done(struct event *event);
void fake_stream_grow(struct stream *stream);    /* makes room for more operations */
void fake_stream_dropped(struct stream *stream); /* the program has destroyed it */

/* calls.c */
void fake_start_thread(void *(*run)(void *));
/* Have the function of a stream's operation called; `returned` is called after it, with fake_lock. False: another one
 * is being called. With fake_lock. */
bool fake_call(struct stream *stream, const struct op *op, void (*returned)(struct stream *stream));
void fake_calls_forked(void);

/* event.c; with fake_lock */
void fake_events_of_context_gone(struct context *context);

/* values.c; with fake_lock. Do what the operation says; false: it is to be waited for. */
bool fake_value(const struct value *value);

/* moments.c; without fake_lock */
enum fake_moment { MOMENT_LAUNCHED, MOMENT_ENDING, MOMENT_ENDED, FAKE_MOMENTS };
void fake_moment(enum fake_moment moment);

/* context.c. Take the milliseconds that a variable of the environment says. */
void fake_take_time(const char *variable);

/* capture.c; with fake_lock */
CUresult fake_unsafe_call(void);                       /* a call that stream capture may forbid */
CUresult fake_sync_call(struct context *context);      /* a call that waits for all of a context */
CUresult fake_stream_sync_call(struct stream *stream); /* a call that waits for a stream */
CUresult fake_order_call(struct stream *stream);       /* work put on a stream outside of capture */
CUresult fake_not_captured(struct stream *stream);     /* a call that a capturing stream does not take */
void fake_capture_context_gone(struct context *context);

struct node;
/* Add a node to the capture of a stream. A mismatch on recapture calls the program back, without fake_lock. */
CUresult fake_capture_node(struct stream *stream, const struct node *node);

/* launch.c; with fake_lock. Record the work in the stream's capture, or submit it; it counts as a launch if it takes
 * device time. */
CUresult fake_submit_work(struct stream *stream, const struct work *work);
/* Submit work outside of any capture, without a look at other captures. */
void fake_put_work(struct stream *stream, const struct work *work);

/* symbols.c */
int fake_unsupported(const char *symbol);

#endif
