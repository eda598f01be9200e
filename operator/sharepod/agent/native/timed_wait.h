/* Interface of `sharepod.agent.on_time` to C: waiting for descriptors or a moment.
 *
 * cffi reads this file as it stands: no preprocessor lines but the guard and the include.
 */
#ifndef SHAREPOD_TIMED_WAIT_H
#define SHAREPOD_TIMED_WAIT_H

#include <stdint.h>

/* A descriptor that is ready: for what, as epoll says it. */
typedef struct {
    int32_t descriptor;
    uint32_t events;
} shp_ready;

/* Wait until a descriptor in `poller`, an epoll instance, is ready, or `timeout_ns` is over; negative: without end.
 * `timer`: a timerfd in `poller` that is set for that long; negative, or where it cannot be set: the wait is for whole
 * milliseconds, rounded up. A signal ends the wait. Return how many of at most `most` are ready and stand in `ready`;
 * negative: an errno. */
int shp_timed_wait(int poller, int timer, int64_t timeout_ns, shp_ready *ready, int most);

#endif
