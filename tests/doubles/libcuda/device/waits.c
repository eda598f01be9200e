/* Waits for the work of streams, events and contexts; the clock; the ring buffer of a stream's operations. */
#include <stdlib.h>
#include <time.h>

#include "device/fake.h"

enum { FIRST_ROOM = 64 };

uint64_t fake_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void fake_sleep_until(uint64_t moment) {
    struct timespec until = {.tv_sec = (time_t)(moment / 1000000000u), .tv_nsec = (long)(moment % 1000000000u)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) != 0)
        ;
}

static uint64_t later(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

static void wait_committed(const uint64_t *committed, uint64_t target) {
    while (*committed < target)
        fake_wait_moved();
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

/* Return the first destroyed stream that has operations which are not on the timeline yet. */
static struct stream *destroyed_and_busy(const struct context *context) {
    struct stream *stream = context->destroyed;
    while (stream != NULL && stream->committed == stream->submitted)
        stream = stream->next;
    return stream;
}

void fake_wait_context(struct context *context) {
    struct stream *fixed[] = {&context->legacy, &context->marks}, *lists[] = {context->per_thread, context->streams};
    uint64_t end = 0;
    for (int i = 0; i < 2; i++) {
        wait_committed(&fixed[i]->committed, fixed[i]->submitted);
        end = later(end, fixed[i]->end);
        for (struct stream *stream = lists[i]; stream != NULL; stream = stream->next) {
            wait_committed(&stream->committed, stream->submitted);
            end = later(end, stream->end);
        }
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

/* The ring buffer is freed after the last operation. The small struct stays, because events may point to it. */
void fake_stream_dropped(struct stream *stream) {
    if (stream->finished < stream->submitted)
        return;
    free(stream->ops);
    stream->ops = NULL;
    stream->room = 0;
}

void fake_stream_grow(struct stream *stream) {
    size_t room = stream->room ? stream->room * 2 : FIRST_ROOM;
    struct op *ops = calloc(room, sizeof *ops);
    for (uint64_t i = stream->finished; i < stream->submitted; i++)
        ops[i % room] = stream->ops[i % stream->room];
    free(stream->ops);
    stream->ops = ops;
    stream->room = room;
}
