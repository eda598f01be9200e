/* A sample queries each stream with cuStreamQuery, except streams that an earlier sample found idle and that had no
 * launch since. It does not use events: recording one in a default stream would order other streams, and an earlier
 * fence shows nothing about later launches.
 *
 * The default streams of a context share one row. The legacy stream is queried like any other stream. A per-thread
 * default stream can be queried only by its own thread. So it counts as in flight until the fence behind its last
 * launch has passed.
 */
#include "time/samples.h"

#include "driver/entries.h"
#include "driver/own_calls.h"

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static uint64_t most(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

/* Return 64 random bits (xorshift64*). */
static uint64_t draw(struct samples *samples, uint64_t now) {
    uint64_t x = samples->random ? samples->random : (now ^ (uintptr_t)samples) | 1;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    samples->random = x;
    return x * 0x2545f4914f6cdd1dull;
}

/* Return the interval to the next sample, ns: uniform between half and one and a half times `mean`. */
static uint64_t draw_interval(struct samples *samples, uint64_t now, uint64_t mean) {
    return mean / 2 + ((draw(samples, now) >> 32) * mean >> 32);
}

void samples_begin(struct samples *samples, const struct gate *gate) {
    samples->taken = samples->in_flight = samples->several = samples->launches = 0;
    samples->launched_before = gate_finished(gate);
}

void samples_count(struct samples *samples, const struct gate *gate) {
    samples->launches = gate_finished(gate) - samples->launched_before;
}

void samples_pause(struct samples *samples) {
    samples->next = 0;
}

/* State of one stream in the registry, as far as it is known without a driver call. */
struct row_sight {
    uint64_t launched;   /* number of launches into the stream by threads that have a queue on it */
    bool legacy;         /* the stream must be queried, because a launch into it may be unfinished (of a default stream:
                            the legacy one) */
    uint32_t per_thread; /* number of per-thread streams with work */
    bool enters;         /* a thread is inside a launch that may go into the stream */
    bool full;           /* a thread is still inside the same launch as at the last sample: the stream is full */
};

/* Return whether the last work of a per-thread stream is unfinished, or has no fence behind it. */
static bool per_thread_unfinished(const struct queue *queue, uint64_t launched) {
    CUevent last = atomic_load(&queue->last);
    return atomic_load(&queue->fenced) != launched || (last != NULL && !event_passed(last, queue->context));
}

static struct row_sight look_at(struct known_stream *row) {
    struct row_sight sight = {.legacy = row->unmetered};
    for (struct queue *queue = row->queues; queue != NULL; queue = queue->stream_next) {
        uint64_t sequence = atomic_load(&queue->slot->sequence), launched = atomic_load(&queue->launched);
        bool inside = sequence & 1;
        sight.enters |= inside;
        sight.full |= inside && queue->inside == sequence;
        queue->inside = inside ? sequence : 0;
        sight.launched += launched;
        if (row->stream != NULL || queue->stream != CU_STREAM_PER_THREAD)
            sight.legacy = true;
        else if (!inside)
            sight.per_thread += per_thread_unfinished(queue, launched);
    }
    sight.legacy &= row->unmetered || sight.launched != row->idle_after;
    return sight;
}

/* Observed state of several streams. */
struct view {
    uint32_t in_flight; /* number of streams with unfinished work; 2 means two or more */
    bool unseen;        /* the state of at least one stream is not known */
};

/* Add the state of one stream of the registry to `view`. The caller holds the lock, and is between own_calls_begin
 * and own_calls_end. */
static void look_at_row(const struct streams *streams, struct known_stream *row, struct view *view) {
    CUcontext popped;
    if (context_unsettled(row->context))
        return;
    struct row_sight sight = look_at(row);
    view->in_flight += sight.per_thread;
    if (sight.full) {
        view->in_flight++;
        return;
    }
    if (sight.enters) {
        view->unseen = true;
        return;
    }
    if (!sight.legacy || DRIVER(cuCtxPushCurrent_v2)(row->context->context) != CUDA_SUCCESS)
        return;
    CUresult result = streams_query(streams, row, row->stream != NULL ? row->stream : CU_STREAM_LEGACY);
    DRIVER(cuCtxPopCurrent_v2)(&popped);
    if (result == CUDA_SUCCESS)
        row->idle_after = sight.launched;
    view->in_flight += result == CUDA_ERROR_NOT_READY;
}

static struct view look(struct streams *streams) {
    struct view view = {0};
    if (!try_lock(&streams->lock))
        return (struct view){.unseen = true};
    CUstreamCaptureMode mode = own_calls_begin();
    for (struct known_stream *row = streams->busy; row != NULL && view.in_flight < 2; row = row->busy_next)
        look_at_row(streams, row, &view);
    own_calls_end(mode);
    unlock(&streams->lock);
    return view;
}

/* The interval depends on the duration of a sample: the shorter one of the last two, because a busy processor may have
 * delayed one of them. */
uint64_t samples_step(struct samples *samples, struct streams *streams, const struct gate *gate, uint64_t now) {
    if (samples->next != 0 && now < samples->next)
        return samples->next;
    uint64_t mean = SAMPLES_MEAN, after = now;
    if (samples->next != 0) {
        struct view view = look(streams);
        samples->taken += view.in_flight > 0 || !view.unseen;
        samples->in_flight += view.in_flight > 0;
        samples->several += view.in_flight > 1;
        samples_count(samples, gate);
        after = sys_now();
        mean = least(most(mean, least(after - now, samples->took) * SAMPLES_SHARE), SAMPLES_MOST);
        samples->took = after - now;
    }
    return samples->next = after + draw_interval(samples, now, mean);
}
