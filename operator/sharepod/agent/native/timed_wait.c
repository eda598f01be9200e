/* Waiting for descriptors or a moment, and looking at signs of life meanwhile: nothing of Python in between. */
#include "timed_wait.h"

#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <time.h>

enum { EVENTS_MOST = 64, NS_IN_MS = 1000000 };

static const int64_t NS_IN_S = 1000000000;

static int64_t monotonic(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * NS_IN_S + time.tv_nsec;
}

static int milliseconds(int64_t ns) {
    if (ns < 0)
        return -1;
    int64_t ms = ns / NS_IN_MS + (ns % NS_IN_MS != 0);
    return ms < INT_MAX ? (int)ms : INT_MAX;
}

/* Wait once: without a look. As `shp_timed_wait`. */
static int wait_once(int poller, int timer, int64_t timeout_ns, shp_ready *ready, int most) {
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
        return -errno;
    for (int i = 0; i < count; i++)
        ready[i] = (shp_ready){.descriptor = events[i].data.fd, .events = events[i].events};
    return count;
}

/* When the process was last heard of. It was never heard later than now: the offset is somewhat too large where the
 * process had written some time before it was read, and one that writes far ahead is not believed. */
static int64_t heard(const shp_beat *beat, int64_t now) {
    uint64_t written = __atomic_load_n(beat->beat_at, __ATOMIC_RELAXED);
    int64_t at = (int64_t)(written + (uint64_t)beat->offset);
    if (at > now)
        at = at - now > beat->patience ? beat->since : now;
    return at > beat->since ? at : beat->since;
}

/* Look at all tenants. Return whether each gives signs of life; the next look is due when one could be silent. */
static bool all_alive(shp_vigil *vigil, int64_t now) {
    int64_t due = INT64_MAX;
    for (int i = 0; i < vigil->count;) {
        int32_t tenant = vigil->beats[i].tenant;
        int64_t until = INT64_MIN;
        for (; i < vigil->count && vigil->beats[i].tenant == tenant; i++) {
            int64_t patient = heard(&vigil->beats[i], now) + vigil->beats[i].patience;
            until = patient > until ? patient : until;
        }
        if (until <= now)
            return false;
        due = until < due ? until : due;
    }
    vigil->due = due;
    return true;
}

/* Wait, and take the looks that are due. As `shp_timed_wait`, but for signals: -EINTR. */
static int wait_and_look(int poller, int timer, int64_t timeout_ns, shp_ready *ready, int most, shp_vigil *vigil) {
    if (vigil->count == 0)
        return wait_once(poller, timer, timeout_ns, ready, most);
    int64_t now = monotonic(), end = timeout_ns < 0 ? INT64_MAX : now + timeout_ns;
    for (;;) {
        bool looks = vigil->due < end;
        int64_t left = (looks ? vigil->due : end) - now;
        int count = wait_once(poller, looks ? vigil->timer : timer, left > 0 ? left : 0, ready, most);
        bool only_timer = count == 1 && ready[0].descriptor == vigil->timer;
        if (count != 0 && !only_timer)
            return count;
        now = monotonic();
        if (now >= vigil->due && !all_alive(vigil, now)) {
            ready[0] = (shp_ready){.descriptor = vigil->descriptor, .events = EPOLLIN};
            vigil->count = 0;
            return 1;
        }
        if (now >= end)
            return count;
    }
}

int shp_timed_wait(int poller, int timer, int64_t timeout_ns, shp_ready *ready, int most, shp_vigil *vigil) {
    int count = wait_and_look(poller, timer, timeout_ns, ready, most, vigil);
    return count == -EINTR ? 0 : count;
}
