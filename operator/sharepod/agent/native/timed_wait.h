/* Interface of `sharepod.agent.on_time` to C: waiting for descriptors or a moment.
 *
 * cffi reads this file unprocessed: no preprocessor lines but the guard and the include.
 */
#ifndef SHAREPOD_TIMED_WAIT_H
#define SHAREPOD_TIMED_WAIT_H

#include <stdint.h>

#include "hand_offs.h"

/* Ready descriptor, with its events as epoll reports them. */
typedef struct {
    int32_t descriptor;
    uint32_t events;
} shp_ready;

/* Signs of life of one process. Moments and durations in nanoseconds. */
typedef struct {
    uintptr_t pulse;  /* address of its struct shp_pulse; 0: this entry of `beats` is free */
    int64_t offset;   /* ns from its clock to CLOCK_MONOTONIC */
    int64_t since;    /* earliest start of its silence */
    int64_t patience; /* longest silence that is tolerated */
    int64_t ahead;    /* time before the end of its work from which its silence matters */
    int32_t tenant;   /* processes of one tenant have the same number and follow each other */
} shp_beat;

enum { SHP_BEATS_MOST = 64 };
enum { SHP_EXACT_NS = 20000000 }; /* a wait longer than this may end up to 1 ms late, and sets no timer */

/* State that a wait checks: an alarm, and tenants, of each of which at least one process must give signs of life.
 * Moments in nanoseconds of CLOCK_MONOTONIC. */
typedef struct {
    int32_t descriptor; /* reported as ready when the alarm rings and when a tenant is silent */
    int32_t timer;      /* a timerfd in the poller; negative: waits are for whole milliseconds */
    int32_t rang;       /* set when the alarm rings; the alarm is then off */
    int32_t silent;     /* set when a tenant is silent; no check is made until it is 0 again */
    int64_t alarm;      /* moment at which it rings; INT64_MAX: never */
    int64_t due;        /* moment of the next check */
    int32_t count;      /* number of used entries of `beats`, from the first on; 0: no check is made */
    shp_beat beats[SHP_BEATS_MOST];
} shp_silence_watch;

/* Wait until a descriptor in `poller`, an epoll instance, is ready, or `timeout_ns` is over; negative: no timeout.
 * `timer`: a timerfd in `poller`, which is set for the timeout. If negative, or if it cannot be set, the wait is for
 * whole milliseconds, rounded up.
 * - A signal ends the wait.
 * - Due checks of `silence_watch` are made during the wait. It continues unless a tenant is silent or the alarm rings.
 * - When a descriptor is ready, the due hand-offs of `hand_offs` are carried out. The wait ends at most 0.1 ms later.
 *   It does not begin while a hand-off is not yet recorded.
 * Return how many descriptors are ready, at most `most`; they are in `ready`. Negative: an errno.
 */
int shp_timed_wait(int poller, int timer, int64_t timeout_ns, shp_ready *ready, int most,
                   shp_silence_watch *silence_watch, shp_hand_offs *hand_offs);

#endif
