/* A stream is asked with cuStreamQuery, unless a sample has seen it idle and nothing was launched into it since. An
 * event would be a barrier in a default stream, and a fence says nothing of the launches behind it.
 *
 * The default streams of a context have one row. The legacy one is asked as any stream is. A per-thread one can be
 * asked by its own thread alone: it counts as in flight until the fence behind its last launch has passed.
 */
#include "time/samples.h"

#include "driver/entries.h"
#include "driver/own_calls.h"

enum sight { IDLE, IN_FLIGHT, UNSEEN /* the sample is dropped */ };

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static uint64_t most(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

/* Return 64 random bits: xorshift64*. */
static uint64_t draw(struct samples *samples, uint64_t now) {
    uint64_t x = samples->random ? samples->random : (now ^ (uintptr_t)samples) | 1;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    samples->random = x;
    return x * 0x2545f4914f6cdd1dull;
}

/* Return the interval to the next sample, ns. */
static uint64_t draw_interval(struct samples *samples, uint64_t now, uint64_t mean) {
    return mean / 2 + ((draw(samples, now) >> 32) * mean >> 32);
}

void samples_begin(struct samples *samples, const struct gate *gate) {
    samples->taken = samples->in_flight = samples->launches = 0;
    samples->launched_before = gate_finished(gate);
}

void samples_count(struct samples *samples, const struct gate *gate) {
    samples->launches = gate_finished(gate) - samples->launched_before;
}

void samples_pause(struct samples *samples) {
    samples->next = 0;
}

/* What is known of a row without a call of the driver. */
struct row_sight {
    uint64_t launched; /* into it, by threads that have queues on it */
    bool legacy;       /* it is to be asked for: something was launched that no sample has seen finished */
    bool per_thread;   /* a per-thread stream has work */
    bool enters;       /* a thread is inside a launch that may go into it */
    bool full;         /* and was inside the same one at the last sample */
};

/* Return whether the last work of a per-thread stream is unfinished, or is behind no fence. */
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
            sight.per_thread |= per_thread_unfinished(queue, launched);
    }
    sight.legacy &= row->unmetered || sight.launched != row->idle_after;
    return sight;
}

/* Return whether the row has unfinished work. With the lock, and own_calls begun. */
static enum sight look_at_row(const struct streams *streams, struct known_stream *row) {
    CUcontext popped;
    if (context_unsettled(row->context))
        return IDLE;
    struct row_sight sight = look_at(row);
    if (sight.full || sight.per_thread)
        return IN_FLIGHT;
    if (sight.enters)
        return UNSEEN;
    if (!sight.legacy || DRIVER(cuCtxPushCurrent_v2)(row->context->context) != CUDA_SUCCESS)
        return IDLE;
    CUresult result = streams_query(streams, row, row->stream != NULL ? row->stream : CU_STREAM_LEGACY);
    DRIVER(cuCtxPopCurrent_v2)(&popped);
    if (result == CUDA_SUCCESS)
        row->idle_after = sight.launched;
    return result == CUDA_ERROR_NOT_READY ? IN_FLIGHT : IDLE;
}

static enum sight look(struct streams *streams) {
    enum sight all = IDLE;
    if (!try_lock(&streams->lock))
        return UNSEEN;
    CUstreamCaptureMode mode = own_calls_begin();
    for (struct known_stream *row = streams->busy; row != NULL && all != IN_FLIGHT; row = row->busy_next) {
        enum sight sight = look_at_row(streams, row);
        all = sight != IDLE ? sight : all;
    }
    own_calls_end(mode);
    unlock(&streams->lock);
    return all;
}

/* A sample is as long as the shorter of the last two: one alone may have been held up by a busy processor. */
uint64_t samples_step(struct samples *samples, struct streams *streams, const struct gate *gate, uint64_t now) {
    if (samples->next != 0 && now < samples->next)
        return samples->next;
    uint64_t mean = SAMPLES_MEAN, after = now;
    if (samples->next != 0) {
        enum sight sight = look(streams);
        samples->taken += sight != UNSEEN;
        samples->in_flight += sight == IN_FLIGHT;
        samples_count(samples, gate);
        after = sys_now();
        mean = least(most(mean, least(after - now, samples->took) * SAMPLES_SHARE), SAMPLES_MOST);
        samples->took = after - now;
    }
    return samples->next = after + draw_interval(samples, now, mean);
}
