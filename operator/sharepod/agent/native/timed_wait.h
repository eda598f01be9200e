/* Interface of `sharepod.agent.on_time` to C: waiting for descriptors or a moment.
 *
 * cffi reads this file as it stands: no preprocessor lines but the guard and the include.
 */
#ifndef SHAREPOD_TIMED_WAIT_H
#define SHAREPOD_TIMED_WAIT_H

#include <stdint.h>

#include "hand_offs.h"

/* A descriptor that is ready: for what, as epoll says it. */
typedef struct {
    int32_t descriptor;
    uint32_t events;
} shp_ready;

/* Signs of life of one process. Moments and durations in nanoseconds. */
typedef struct {
    uintptr_t pulse;  /* address of its struct shp_pulse; 0: the place is free */
    int64_t offset;   /* from its clock to CLOCK_MONOTONIC */
    int64_t since;    /* its silence counts from then on at the earliest */
    int64_t patience; /* silence that it may keep */
    int64_t ahead;    /* before the end of its work at which its silence matters */
    int32_t tenant;   /* processes of one tenant have the same number and follow each other */
} shp_beat;

enum { SHP_BEATS_MOST = 64 };
enum { SHP_EXACT_NS = 20000000 }; /* a wait for longer may be a millisecond more, and sets no timer */

/* What a wait looks after: an alarm, and tenants of which at least one process each is expected to give signs of
 * life. Moments in nanoseconds of CLOCK_MONOTONIC. */
typedef struct {
    int32_t descriptor; /* told of as ready when the alarm rings and when a tenant is silent */
    int32_t timer;      /* a timerfd in the poller; negative: waits are for whole milliseconds */
    int32_t rang;       /* set when the alarm rings, which ends it */
    int32_t silent;     /* set when a tenant is silent; no look is taken until it is 0 again */
    int64_t alarm;      /* when it rings; INT64_MAX: never */
    int64_t due;        /* when the next look is due */
    int32_t count;      /* places of `beats` that are looked at, the first ones; 0: no look is taken */
    shp_beat beats[SHP_BEATS_MOST];
} shp_silence_watch;

/* Wait until a descriptor in `poller`, an epoll instance, is ready, or `timeout_ns` is over; negative: without end.
 * `timer`: a timerfd in `poller` that is set for that long; negative, or where it cannot be set: the wait is for whole
 * milliseconds, rounded up. A signal ends the wait. Whenever a look of `silence_watch` is due meanwhile it is taken,
 * and the wait goes on unless a tenant is silent or the alarm rings. Where a descriptor is ready, the hand-offs of
 * `hand_offs` that are due are carried out; the wait ends a tenth of a millisecond after them at the latest, and does
 * not begin while one is to be taken note of. Return how many of at most `most` are ready and stand in `ready`;
 * negative: an errno. */
int shp_timed_wait(int poller, int timer, int64_t timeout_ns, shp_ready *ready, int most,
                   shp_silence_watch *silence_watch, shp_hand_offs *hand_offs);

#endif
