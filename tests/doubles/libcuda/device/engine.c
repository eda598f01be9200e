/* The queue of each device and the thread that moves it.
 *
 * Guarantees: operations of one process on one device run in the order in which they were submitted, whatever their
 * stream (a valid schedule of a device that runs one kernel at a time, and it keeps the rules of the legacy stream),
 * but an event waits for no more than it has to: what its own stream, and by the legacy stream's rules others, had
 * before; kernels of several processes take turns in slices; a process that dies takes back all of its queue but at
 * most a slice and AHEAD_NS. Nothing spins: kernels occupy the timeline while the thread sleeps. A kernel's start is
 * not delayed by a late wake-up of the thread.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "device/fake.h"

enum { AHEAD_NS = 500 * 1000, SLICE_NS = 2 * 1000 * 1000, RETIRE_NS = 200 * 1000, HANG_POLL_NS = 2 * 1000 * 1000 };

struct queue {
    struct op *ops;
    size_t capacity, head, committed, tail; /* counted without end; head <= committed <= tail */
    uint64_t cursor;                        /* when the last committed slice ends */
    bool calling;                           /* a function of the program, without fake_lock */
};

pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved; /* something was committed or retired */
static pthread_cond_t wake;  /* the thread has something new to look at */
static struct queue queues[FAKE_DEVICES];
static bool running;
static bool idle;        /* the thread sleeps without a time to wake up at */
static unsigned blocked; /* launches that wait for room */
static bool progress;    /* something was committed or retired since the last broadcast */

uint64_t fake_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static struct timespec timespec_of(uint64_t moment) {
    return (struct timespec){.tv_sec = (time_t)(moment / 1000000000u), .tv_nsec = (long)(moment % 1000000000u)};
}

void fake_sleep_until(uint64_t moment) {
    struct timespec until = timespec_of(moment);
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) != 0)
        ;
}

static struct op *op_at(struct queue *queue, size_t index) {
    return &queue->ops[index % queue->capacity];
}

static uint64_t later(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

/* Return whether work of one of the two streams waits for earlier work of the other. */
static bool ordered(const struct stream *one, const struct stream *other) {
    const struct stream *legacy = &one->context->legacy;
    if (one == other)
        return true;
    return one->context == other->context && ((one == legacy && !(other->flags & CU_STREAM_NON_BLOCKING)) ||
                                              (other == legacy && !(one->flags & CU_STREAM_NON_BLOCKING)));
}

/* Return the end of all work on the timeline that new work of this stream waits for. */
static uint64_t ordered_end(const struct stream *stream) {
    struct context *context = stream->context;
    const struct stream *fixed[] = {&context->legacy, &context->per_thread},
                        *lists[] = {context->streams, context->destroyed};
    uint64_t end = stream->end;
    for (int i = 0; i < 2; i++) {
        if (ordered(stream, fixed[i]))
            end = later(end, fixed[i]->end);
        for (const struct stream *other = lists[i]; other != NULL; other = other->next)
            if (ordered(stream, other))
                end = later(end, other->end);
    }
    return end;
}

/* Commit an event ahead of the work of streams that it does not wait for. */
static bool goes_ahead(const struct op *op) {
    return op->kind == OP_EVENT && !op->behind_all;
}

static void finish_commit(struct op *op, uint64_t end) {
    op->end = end;
    progress = true;
    op->stream->committed++;
    op->stream->end = end;
    if (op->kind == OP_EVENT) {
        struct event *event = op->event;
        event->committed = op->generation;
        event->end = end;
    }
}

/* Puts what is next on the timeline, at most AHEAD_NS ahead of now. Returns whether the head of the queue is hung.
 * Functions of the program are called by the queue's own thread alone: may_call. */
static bool commit(struct queue *queue, int device, uint64_t now, bool may_call) {
    while (!queue->calling && queue->committed < queue->tail) {
        struct op *op = op_at(queue, queue->committed);
        if (goes_ahead(op)) {
            finish_commit(op, later(op->ready, ordered_end(op->stream)));
            queue->committed++;
            continue;
        }
        if (queue->cursor >= now + AHEAD_NS)
            break;
        uint64_t start = later(op->ready, queue->cursor);
        if (op->kind == OP_HANG) {
            if (!fake_state_released())
                return true;
            start = later(start, now);
            fake_state_usage(device)->kernels++;
        } else if (op->kind == OP_WAIT) {
            if (op->event->committed < op->generation)
                return false; /* recorded on another device, not there yet */
            start = later(start, op->event->end);
        } else if (op->kind == OP_COPY) {
            start += op->left;
        } else if (op->kind == OP_HOST) {
            if (!may_call || start > now)
                return false;
            queue->calling = true;
            pthread_mutex_unlock(&fake_lock);
            op->call(op->argument); /* only this thread moves the queue on while it is calling */
            pthread_mutex_lock(&fake_lock);
            queue->calling = false;
            op = op_at(queue, queue->committed); /* the queue may have grown */
            start = fake_now();
        } else if (op->kind == OP_KERNEL) {
            uint64_t slice = op->left < SLICE_NS ? op->left : SLICE_NS;
            queue->cursor = start = fake_state_occupy(device, start, slice);
            op->left -= slice;
            if (op->left > 0)
                continue;
            fake_state_usage(device)->kernels++;
        }
        queue->cursor = start;
        finish_commit(op, start);
        queue->committed++;
    }
    return false;
}

static void retire(struct queue *queue, uint64_t now) {
    while (queue->head < queue->committed && op_at(queue, queue->head)->end <= now) {
        struct op *op = op_at(queue, queue->head++);
        op->stream->finished++;
        progress = true;
        if (op->kind == OP_RETURN)
            op->call(op->argument);
    }
}

static void *engine(void *unused) {
    (void)unused;
    prctl(PR_SET_TIMERSLACK, 1);
    pthread_mutex_lock(&fake_lock);
    for (;;) {
        uint64_t now = fake_now(), next = UINT64_MAX;
        for (int device = 0; device < FAKE_DEVICES; device++) {
            struct queue *queue = &queues[device];
            if (queue->head == queue->tail)
                continue;
            bool hung = commit(queue, device, now, true);
            retire(queue, now);
            uint64_t due = UINT64_MAX;
            if (hung)
                due = now + HANG_POLL_NS;
            else if (queue->committed < queue->tail)
                due = queue->cursor > now + AHEAD_NS ? queue->cursor - AHEAD_NS / 2 : now + RETIRE_NS;
            else if (queue->head < queue->committed)
                due = op_at(queue, queue->committed - 1)->end;
            if (blocked > 0 && queue->head < queue->committed)
                due = later(op_at(queue, queue->head)->end, now + RETIRE_NS);
            next = due < next ? due : next;
        }
        if (progress)
            pthread_cond_broadcast(&moved);
        progress = false;
        idle = next == UINT64_MAX;
        struct timespec until = timespec_of(next);
        if (idle)
            pthread_cond_wait(&wake, &fake_lock);
        else
            pthread_cond_timedwait(&wake, &fake_lock, &until);
        idle = false;
    }
    return NULL;
}

static void start_engine(void) {
    pthread_condattr_t monotonic;
    pthread_attr_t detached;
    pthread_t thread;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&wake, &monotonic);
    pthread_cond_init(&moved, NULL);
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    running = pthread_create(&thread, &detached, engine, NULL) == 0;
    if (!running)
        abort(); /* a test double without its device is no use to any test */
}

static void grow(struct queue *queue) {
    size_t capacity = queue->capacity ? queue->capacity * 2 : 4096;
    struct op *ops = calloc(capacity, sizeof *ops);
    for (size_t i = queue->head; i < queue->tail; i++)
        ops[i % capacity] = *op_at(queue, i);
    free(queue->ops);
    queue->ops = ops;
    queue->capacity = capacity;
}

void fake_submit(struct stream *stream, struct op op) {
    int device = stream->context->device;
    struct queue *queue = &queues[device];
    op.stream = stream;
    stream->submitted++;
    if (op.kind == OP_KERNEL && op.left == 0 && queue->head == queue->tail) {
        fake_state_usage(device)->kernels++; /* an empty kernel on an idle device: over before anyone can look */
        stream->committed++;
        stream->finished++;
        return;
    }
    if (!running)
        start_engine();
    if (stream->submitted - stream->finished > QUEUE_DEPTH) {
        blocked++; /* the thread has a time to wake up at: the queue is full */
        while (stream->submitted - stream->finished > QUEUE_DEPTH)
            pthread_cond_wait(&moved, &fake_lock);
        blocked--;
    }
    if (queue->tail - queue->head == queue->capacity)
        grow(queue);
    op.ready = fake_now();
    size_t place = queue->tail++;
    if (goes_ahead(&op))
        for (; place > queue->committed + queue->calling && !ordered(op_at(queue, place - 1)->stream, stream); place--)
            *op_at(queue, place) = *op_at(queue, place - 1);
    *op_at(queue, place) = op;
    retire(queue, op.ready);
    commit(queue, device, op.ready, false);
    if (idle)
        pthread_cond_signal(&wake);
}

static void wait_committed(const uint64_t *committed, uint64_t target) {
    while (*committed < target)
        pthread_cond_wait(&moved, &fake_lock);
}

void fake_settle(int device) {
    retire(&queues[device], fake_now());
}

static void sleep_unlocked(uint64_t moment) {
    pthread_mutex_unlock(&fake_lock);
    if (moment > fake_now())
        fake_sleep_until(moment);
    pthread_mutex_lock(&fake_lock);
}

void fake_wait_stream(struct stream *stream) {
    wait_committed(&stream->committed, stream->submitted);
    sleep_unlocked(stream->end);
}

void fake_wait_event(struct event *event) {
    wait_committed(&event->committed, event->recorded);
    sleep_unlocked(event->end);
}

/* The first stream that was destroyed with work on it which is not on the timeline yet; forgets those that are done. */
static struct stream *destroyed_and_busy(struct context *context) {
    for (struct stream **at = &context->destroyed; *at != NULL;) {
        if ((*at)->committed != (*at)->submitted)
            return *at;
        if (fake_stream_idle(*at))
            *at = (*at)->next;
        else
            at = &(*at)->next;
    }
    return NULL;
}

void fake_wait_context(struct context *context) {
    struct stream *fixed[] = {&context->legacy, &context->per_thread};
    uint64_t end = 0;
    for (int i = 0; i < 2; i++) {
        wait_committed(&fixed[i]->committed, fixed[i]->submitted);
        end = later(end, fixed[i]->end);
    }
    for (struct stream *stream = context->streams; stream != NULL; stream = stream->next) {
        wait_committed(&stream->committed, stream->submitted);
        end = later(end, stream->end);
    }
    for (struct stream *stream; (stream = destroyed_and_busy(context)) != NULL;)
        wait_committed(&stream->committed, stream->submitted);
    for (struct stream *stream = context->destroyed; stream != NULL; stream = stream->next)
        end = later(end, stream->end);
    sleep_unlocked(end);
}

bool fake_stream_idle(struct stream *stream) {
    return stream->committed == stream->submitted && stream->end <= fake_now();
}

bool fake_event_done(struct event *event) {
    return event->committed == event->recorded && event->end <= fake_now();
}

void fake_engine_forked(void) {
    pthread_mutex_init(&fake_lock, NULL);
    memset(queues, 0, sizeof queues);
    running = idle = false;
    blocked = 0;
}
