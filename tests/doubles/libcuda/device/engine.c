/* The work of each device, and the thread that schedules it.
 *
 * Guarantees:
 * - Operations of a stream run in order. Operations of different streams run in parallel, except by the rules of the
 *   legacy stream. Kernels that run at the same time share the device's time equally; kernels of higher priority run
 *   first. Copies with host memory run in parallel to kernels, one at a time.
 * - With FAKE_CUDA_ORDER=strict a device runs one operation at a time, in the order of submission, for tests that need
 *   exact times. Only events do not wait for other streams.
 * - Kernels of several processes take turns in slices of FAKE_CUDA_SLICE_US. Before a slice of another process, the
 *   device is idle for FAKE_CUDA_SWITCH_US, which counts as no process's use. When a process dies, its queue is
 *   dropped, except at most a slice and the scheduled part of the timeline.
 * - With FAKE_CUDA_AHEAD_MS=N the timeline is scheduled N ms ahead: that much of a process's launched work runs, as on
 *   hardware, while the process is stopped.
 * - No thread spins: kernels occupy the timeline while the thread sleeps. A late wake-up of the thread does not delay a
 *   kernel's start.
 * - Functions of the program (calls.c) block only their own stream.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "device/fake.h"

/* In ns: how far ahead the timeline is scheduled by default; the turn of a process, and of a stream in it; the thread's
 * sleep times. */
enum {
    AHEAD_NS = 500 * 1000,
    SLICE_NS = 2 * 1000 * 1000, /* FAKE_CUDA_SLICE_US changes it */
    STREAM_SLICE_NS = 250 * 1000,
    RETIRE_NS = 200 * 1000,
    HANG_POLL_NS = 2 * 1000 * 1000,
    MEETING_NS = 200 * 1000 /* device time between two checks of a collective whether its peers have arrived */
};
enum { MOST_LOOKED_AT = 64 };

struct queue {
    struct stream *listed; /* streams with unfinished work */
    unsigned count;        /* their number */
    uint64_t cursor;       /* end of the last committed slice of this process */
    uint64_t copied;       /* end of the copy engine's scheduled work */
    uint64_t turn_left;    /* ns of the process's turn that are not scheduled yet */
    uint64_t turns, orders;
};

pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved; /* signalled when an operation was put on the timeline or has ended */
static pthread_cond_t wake;  /* signalled when the thread has something new to schedule */
static struct queue queues[FAKE_DEVICES];
static bool running, strict;
static uint64_t ahead_ns = AHEAD_NS, slice_ns = SLICE_NS;
static uint64_t switch_ns;    /* ns that the device takes to change to another process */
static uint64_t asleep_until; /* time until which the thread sleeps; 0: it does not sleep */
static unsigned blocked;      /* number of launches that wait for room in a full queue */
static bool progress;         /* an operation was put on the timeline or has ended since the last broadcast */

static struct timespec timespec_of(uint64_t moment) {
    return (struct timespec){.tv_sec = (time_t)(moment / 1000000000u), .tv_nsec = (long)(moment % 1000000000u)};
}

static struct op *op_at(const struct stream *stream, uint64_t number) {
    return &stream->ops[number % stream->room];
}

/* Return the next operation of the stream that is not on the timeline; NULL: none. */
static struct op *next_op(const struct stream *stream) {
    return stream->committed < stream->submitted ? op_at(stream, stream->committed) : NULL;
}

static uint64_t later(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

static uint64_t earlier(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

/* Return whether the legacy stream of its context waits for this stream, and this stream for the legacy stream. */
static bool blocking(const struct stream *stream) {
    const struct context *context = stream->context;
    return stream != &context->legacy && stream != &context->marks && !(stream->flags & CU_STREAM_NON_BLOCKING);
}

/* Return whether `other` has operations that were submitted before `op` and are not on the timeline yet. */
static bool behind(const struct op *op, const struct stream *other) {
    const struct op *next = next_op(other);
    return next != NULL && next->order < op->order;
}

/* Return whether all work for which the stream's next operation waits is on the timeline. `end`: when that work ends.
 */
static bool may_begin(const struct queue *queue, const struct op *op, uint64_t *end) {
    struct stream *stream = op->stream;
    struct context *context = stream->context;
    *end = later(stream->end, op->ready);
    if (blocking(stream)) {
        *end = later(*end, context->legacy.end);
        return !behind(op, &context->legacy);
    }
    if (stream->flags & CU_STREAM_NON_BLOCKING)
        return true;
    *end = later(*end, stream == &context->legacy ? context->blocking_end : 0);
    for (const struct stream *other = queue->listed; other != NULL; other = other->listed_next) {
        if (other->context != context || other == stream)
            continue;
        if ((stream == &context->marks || blocking(other)) && behind(op, other))
            return false;
        if (stream != &context->marks)
            continue;
        for (uint64_t i = other->finished; i < other->committed && op_at(other, i)->order < op->order; i++)
            *end = later(*end, op_at(other, i)->end);
    }
    return true;
}

/* Return whether the order of submission allows the operation to begin: always, except in strict order. */
static bool in_order(const struct queue *queue, const struct op *op) {
    if (!strict || op->kind == OP_EVENT)
        return true;
    for (const struct stream *other = queue->listed; other != NULL; other = other->listed_next)
        if (next_op(other) != NULL && next_op(other)->kind != OP_EVENT && behind(op, other))
            return false;
    return true;
}

static void put_on_timeline(struct op *op, uint64_t end) {
    struct stream *stream = op->stream;
    struct event *event = op->event;
    op->end = end;
    progress = true;
    stream->committed++;
    stream->end = end;
    if (blocking(stream))
        stream->context->blocking_end = later(stream->context->blocking_end, end);
    if (op->kind != OP_EVENT)
        return;
    event->ends[op->generation % EVENT_RECORDS] = end;
    if (op->generation > event->committed) {
        event->committed = op->generation;
        event->end = end;
    }
}

/* End the stream's next operation, a host function that has returned, and wake the threads that wait. */
static void function_returned(struct stream *stream) {
    stream->calling = false;
    put_on_timeline(next_op(stream), fake_now());
    pthread_cond_broadcast(&moved);
    pthread_cond_signal(&wake);
}

/* Return the time at which a wait for an event's record ends; UINT64_MAX: the record is not on the timeline. */
static uint64_t record_end(const struct op *op) {
    const struct event *event = op->event;
    if (event->magic == MAGIC_DEAD)
        return 0;
    if (event->committed < op->generation)
        return UINT64_MAX;
    return event->committed - op->generation < EVENT_RECORDS ? event->ends[op->generation % EVENT_RECORDS] : event->end;
}

/* Return whether the operation waits for the program or for another stream. */
static bool waits(const struct op *op) {
    return op->kind == OP_WAIT || op->kind == OP_HOST || (op->kind == OP_VALUE && !op->writes);
}

/* Return the order of the stream's first unfinished wait; UINT64_MAX: there is none. */
static uint64_t first_wait(const struct stream *stream) {
    uint64_t i = stream->finished;
    while (stream->waiting > 0 && !waits(op_at(stream, i)))
        i++;
    return stream->waiting > 0 ? op_at(stream, i)->order : UINT64_MAX;
}

/* Return whether an operation that is submitted now would be behind an unfinished wait: in its stream, in a stream for
 * which its stream waits, or in a stream for which an operation of the legacy stream waits that it waits for. */
static bool behind_wait(const struct queue *queue, const struct stream *stream) {
    const struct stream *legacy = &stream->context->legacy;
    uint64_t before = UINT64_MAX; /* a blocking stream waits for work of others only as the legacy stream does */
    if (stream->waiting > 0 || (blocking(stream) && legacy->waiting > 0))
        return true;
    if (blocking(stream) && legacy->finished < legacy->submitted)
        before = op_at(legacy, legacy->submitted - 1)->order;
    else if (stream != legacy)
        return false;
    for (const struct stream *other = queue->listed; other != NULL; other = other->listed_next)
        if (other->context == stream->context && blocking(other) && first_wait(other) < before)
            return true;
    return false;
}

/* Count a launch that ends at `end`. */
static void count_kernel(const struct op *op, int device, uint64_t end) {
    struct fake_usage *usage = fake_state_usage(device);
    usage->kernels++;
    if (op->behind) { /* afterwards: a reader must not see an unfinished launch that is behind no wait */
        usage->behind_end = end;
        usage->behind--;
    }
}

/* Put the stream's next operation on the timeline, if it may begin and is no kernel. `due`: time of the next check. */
static bool advance(struct queue *queue, int device, struct stream *stream, uint64_t now, uint64_t *due) {
    struct op *op = next_op(stream);
    uint64_t end;
    if (op == NULL || stream->calling || op->kind == OP_KERNEL || !in_order(queue, op) || !may_begin(queue, op, &end))
        return false;
    if (strict && op->kind != OP_EVENT) {
        if (queue->cursor >= now + ahead_ns) {
            *due = earlier(*due, queue->cursor - ahead_ns / 2);
            return false;
        }
        end = later(end, queue->cursor);
    }
    bool works = op->kind == OP_HANG || op->kind == OP_HOST || op->kind == OP_VALUE;
    if ((works && end > now) || (op->kind == OP_COPY && end > now + ahead_ns)) {
        *due = earlier(*due, end);
        return false;
    }
    switch (op->kind) {
    case OP_HANG:
        if (!fake_state_released()) {
            *due = earlier(*due, now + HANG_POLL_NS);
            return false;
        }
        end = later(end, now);
        count_kernel(op, device, end);
        break;
    case OP_VALUE:
        if (!fake_value(op->value)) {
            *due = earlier(*due, now + RETIRE_NS);
            return false;
        }
        end = op->value->writes ? end : later(end, now);
        free(op->value);
        break;
    case OP_HOST: stream->calling = fake_call(stream, op, function_returned); return false;
    case OP_COPY: end = queue->copied = later(end, queue->copied) + op->left; break;
    case OP_WAIT:
        if (record_end(op) == UINT64_MAX) {
            *due = earlier(*due, now + RETIRE_NS);
            return false;
        }
        end = later(end, record_end(op));
        break;
    default: break;
    }
    if (strict && op->kind != OP_EVENT)
        queue->cursor = later(queue->cursor, end);
    put_on_timeline(op, end);
    return true;
}

/* Return whether the device runs `one` before `other`. */
static bool goes_first(const struct stream *one, const struct stream *other) {
    return one->priority != other->priority ? one->priority < other->priority : one->served < other->served;
}

/* Return whether all ranks of a collective have arrived. */
static bool met(struct op *op) {
    if (!op->arrived)
        atomic_fetch_add(op->meeting, 1);
    op->arrived = true;
    return atomic_load(op->meeting) >= op->met_at || fake_state_released();
}

/* Run one of the ready kernels for a time slice. Return whether one ran. `due`: time of the next call. */
static bool run_kernel(struct queue *queue, int device, uint64_t now, uint64_t *due) {
    struct stream *chosen = NULL;
    uint64_t first = UINT64_MAX, end, able = 0;
    for (int pass = 0; pass < 2; pass++) /* first find the time at which a kernel can begin; then choose among the
                                            kernels that can begin by then */
        for (struct stream *stream = queue->listed; stream != NULL; stream = stream->listed_next) {
            const struct op *op = next_op(stream);
            if (op == NULL || op->kind != OP_KERNEL || !in_order(queue, op) || !may_begin(queue, op, &end))
                continue;
            if (pass == 0) {
                first = earlier(first, end);
            } else if (end <= later(queue->cursor, first)) {
                able++;
                chosen = chosen == NULL || goes_first(stream, chosen) ? stream : chosen;
            }
        }
    if (chosen == NULL)
        return false;
    uint64_t start = later(queue->cursor, first);
    struct op *op = next_op(chosen);
    if (op->meeting != NULL && start > now) { /* its duration is not known in advance */
        *due = earlier(*due, start);
        return false;
    }
    if (start > queue->cursor || queue->turn_left == 0) {
        if (start >= now + ahead_ns) {
            *due = earlier(*due, start - ahead_ns / 2);
            return false;
        }
        queue->turn_left = slice_ns;
    }
    bool spins = op->meeting != NULL && !met(op);
    if (op->meeting != NULL)
        op->left = spins ? MEETING_NS : 0;
    uint64_t slice = earlier(op->left, queue->turn_left);
    if (able > 1)
        slice = earlier(slice, STREAM_SLICE_NS);
    chosen->served = ++queue->turns;
    queue->turn_left -= slice;
    queue->cursor = op->left > 0 ? fake_state_occupy(device, start, slice, switch_ns) : start;
    op->left -= slice;
    if (op->left == 0 && !spins) {
        count_kernel(op, device, queue->cursor);
        if (op->faults)
            op->stream->context->faults_at = queue->cursor;
        put_on_timeline(op, queue->cursor);
    }
    return true;
}

/* Put operations that may begin on the timeline, at most ahead_ns and a turn ahead of now. Return the time of the next
 * check. */
static uint64_t commit(struct queue *queue, int device, uint64_t now) {
    uint64_t due;
    bool more;
    do {
        due = UINT64_MAX;
        more = false;
        for (struct stream *stream = queue->listed; stream != NULL; stream = stream->listed_next)
            while (advance(queue, device, stream, now, &due))
                more = true;
        more |= run_kernel(queue, device, now, &due);
    } while (more);
    return due;
}

/* Record operations that have ended. Return the time at which the next one ends. */
static uint64_t retire(struct queue *queue, uint64_t now) {
    uint64_t due = UINT64_MAX;
    for (struct stream **at = &queue->listed; *at != NULL;) {
        struct stream *stream = *at;
        while (stream->finished < stream->committed && op_at(stream, stream->finished)->end <= now) {
            struct op op = *op_at(stream, stream->finished++);
            progress = true;
            stream->waiting -= waits(&op);
            if (op.kind == OP_RETURN)
                op.call(op.argument);
        }
        if (stream->finished < stream->committed)
            due =
                earlier(due, blocked > 0 ? later(op_at(stream, stream->finished)->end, now + RETIRE_NS) : stream->end);
        if (stream->finished < stream->submitted) {
            at = &stream->listed_next;
            continue;
        }
        *at = stream->listed_next;
        stream->listed = false;
        queue->count--;
        if (stream->magic == 0)
            fake_stream_dropped(stream);
    }
    return due;
}

static void notify(void) {
    if (progress)
        pthread_cond_broadcast(&moved);
    progress = false;
}

static void *engine(void *unused) {
    (void)unused;
    prctl(PR_SET_TIMERSLACK, 1);
    pthread_mutex_lock(&fake_lock);
    for (;;) {
        uint64_t now = fake_now(), next = UINT64_MAX;
        for (int device = 0; device < FAKE_DEVICES; device++) {
            if (queues[device].listed == NULL)
                continue;
            next = earlier(next, commit(&queues[device], device, now));
            next = earlier(next, retire(&queues[device], now));
        }
        notify();
        asleep_until = next;
        struct timespec until = timespec_of(next);
        if (next == UINT64_MAX)
            pthread_cond_wait(&wake, &fake_lock);
        else
            pthread_cond_timedwait(&wake, &fake_lock, &until);
        asleep_until = 0;
    }
    return NULL;
}

static void start_engine(void) {
    pthread_condattr_t monotonic;
    const char *order = getenv("FAKE_CUDA_ORDER"), *ahead = getenv("FAKE_CUDA_AHEAD_MS"),
               *slice = getenv("FAKE_CUDA_SLICE_US"), *between = getenv("FAKE_CUDA_SWITCH_US");
    strict = order != NULL && strcmp(order, "strict") == 0;
    if (ahead != NULL)
        ahead_ns = strtoull(ahead, NULL, 10) * 1000000u;
    if (slice != NULL)
        slice_ns = later(strtoull(slice, NULL, 10), 1) * 1000u;
    if (between != NULL)
        switch_ns = strtoull(between, NULL, 10) * 1000u;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&wake, &monotonic);
    pthread_cond_init(&moved, NULL);
    running = true;
    fake_start_thread(engine);
}

void fake_submit(struct stream *stream, struct op op) {
    int device = stream->context->device;
    struct queue *queue = &queues[device];
    op.stream = stream;
    op.writes = op.value != NULL && op.value->writes;
    if (stream->context->ending || !stream->context->alive) { /* the context has ended during the call */
        if (op.kind == OP_RETURN)
            op.call(op.argument);
        return;
    }
    if (op.kind == OP_KERNEL && op.left == 0 && queue->listed == NULL) {
        fake_state_usage(device)->kernels++; /* an empty kernel on an idle device ends before any check could see it */
        return;
    }
    if (!running)
        start_engine();
    if (stream->submitted - stream->finished >= QUEUE_DEPTH) {
        blocked++;
        pthread_cond_signal(&wake);
        while (stream->submitted - stream->finished >= QUEUE_DEPTH)
            pthread_cond_wait(&moved, &fake_lock);
        blocked--;
        if (stream->context->ending || !stream->context->alive)
            return;
    }
    if (stream->submitted - stream->finished == stream->room)
        fake_stream_grow(stream);
    op.behind = (op.kind == OP_KERNEL || op.kind == OP_HANG) && behind_wait(queue, stream);
    if (op.behind)
        fake_state_usage(device)->behind++;
    stream->waiting += waits(&op);
    op.ready = fake_now();
    op.order = ++queue->orders;
    *op_at(stream, stream->submitted++) = op;
    if (!stream->listed) {
        stream->listed = true;
        stream->listed_next = queue->listed;
        queue->listed = stream;
        queue->count++;
    }
    uint64_t due = 0;
    if (queue->count <= MOST_LOOKED_AT) {
        due = commit(queue, device, op.ready);
        due = earlier(due, retire(queue, op.ready));
        notify();
    }
    if (due < asleep_until)
        pthread_cond_signal(&wake);
}

void fake_wait_moved(void) {
    pthread_cond_wait(&moved, &fake_lock);
}

void fake_settle(int device) {
    retire(&queues[device], fake_now());
}

void fake_engine_forked(void) {
    pthread_mutex_init(&fake_lock, NULL);
    memset(queues, 0, sizeof queues);
    running = false;
    fake_calls_forked();
    asleep_until = 0;
    blocked = 0;
}
