/* Waiting for descriptors or a moment: two system calls at most, and nothing of Python in between. */
#include "timed_wait.h"

#include <errno.h>
#include <limits.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <time.h>

enum { EVENTS_MOST = 64, NS_IN_MS = 1000000 };

static const int64_t NS_IN_S = 1000000000;

static int milliseconds(int64_t ns) {
    if (ns < 0)
        return -1;
    int64_t ms = ns / NS_IN_MS + (ns % NS_IN_MS != 0);
    return ms < INT_MAX ? (int)ms : INT_MAX;
}

int shp_timed_wait(int poller, int timer, int64_t timeout_ns, shp_ready *ready, int most) {
    struct epoll_event events[EVENTS_MOST];
    int ms = milliseconds(timeout_ns);
    if (timer >= 0 && timeout_ns > 0) {
        struct itimerspec at = {
            .it_value = {.tv_sec = (time_t)(timeout_ns / NS_IN_S), .tv_nsec = (long)(timeout_ns % NS_IN_S)}};
        if (timerfd_settime(timer, 0, &at, NULL) == 0 && ms < INT_MAX)
            ms++; /* the timer ends the wait; should it not, this does */
    }
    int count = epoll_wait(poller, events, most < EVENTS_MOST ? most : EVENTS_MOST, ms);
    if (count < 0)
        return errno == EINTR ? 0 : -errno;
    for (int i = 0; i < count; i++)
        ready[i] = (shp_ready){.descriptor = events[i].data.fd, .events = events[i].events};
    return count;
}
