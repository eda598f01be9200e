/* Interface of `sharepod.agent.on_time` to C: waiting for descriptors or a moment.
 *
 * cffi reads this file unprocessed: its only preprocessor lines are the guard and the include.
 */
#ifndef SHAREPOD_TIMED_WAIT_H
#define SHAREPOD_TIMED_WAIT_H

#include <stdint.h>

#include "hand_offs.h"

/* Descriptor that is ready, with its events as epoll reports them. */
typedef struct {
    int32_t descriptor;
    uint32_t events;
} shp_ready;

/* Where and how to check the heartbeats of one process. Moments and durations in nanoseconds. */
typedef struct {
    uintptr_t pulse;  /* address of the struct shp_pulse that the process writes; 0: this entry of `beats` is free */
    int64_t offset;   /* to add to a time of its clock to get CLOCK_MONOTONIC */
    int64_t since;    /* earliest start of its silence, such as its grant */
    int64_t patience; /* longest silence for which the process is not yet silent */
    int64_t ahead;    /* time before the end of its launched work from which its silence matters */
    int32_t tenant;   /* number that all processes of one tenant share; they are adjacent in `beats` */
} shp_beat;

enum { SHP_BEATS_MOST = 64 };
enum { SHP_EXACT_NS = 20000000 }; /* a wait longer than this may end up to 1 ms late, and sets no timer */

/* State that a wait checks: the alarm, and the heartbeats of watched tenants. A tenant is silent if none of its
 * processes writes heartbeats. Moments in nanoseconds of CLOCK_MONOTONIC. */
typedef struct {
    int32_t descriptor; /* reported as ready when the alarm rings or a tenant is silent */
    int32_t timer;      /* timerfd that is registered in the poller; negative: waits are for whole milliseconds */
    int32_t rang;       /* set to 1 when the alarm rings; the alarm is then off */
    int32_t silent;     /* set to 1 when a tenant is silent; no check is made until Python sets it to 0 */
    int64_t alarm;      /* moment at which the alarm rings; INT64_MAX: never */
    int64_t due;        /* moment of the next check of the watched tenants */
    int32_t count;      /* number of used entries of `beats`, from the first on; 0: no check is made */
    shp_beat beats[SHP_BEATS_MOST];
} shp_silence_watch;

/* Wait until a descriptor in `poller`, an epoll instance, is ready, or `timeout_ns` is over; negative: no timeout.
 * `timer`: a timerfd in `poller`, which is set to the timeout. If it is negative or cannot be set, the timeout is
 * rounded up to whole milliseconds.
 * - A signal ends the wait.
 * - Due checks of `silence_watch` are made during the wait. The wait ends if a tenant is silent or the alarm rings.
 * - When a descriptor is ready, the possible hand-offs of `hand_offs` are carried out. The wait ends at most 0.1 ms
 *   later. While Python has not recorded a hand-off, the call does not wait.
 * Write the ready descriptors, at most `most`, to `ready`, and return their number. Negative: an errno.
 */
int shp_timed_wait(int poller, int timer, int64_t timeout_ns, shp_ready *ready, int most,
                   shp_silence_watch *silence_watch, shp_hand_offs *hand_offs);

#endif
