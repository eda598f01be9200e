/* The event loop's wait for descriptors or a moment. It also does silence checks and prepared hand-offs, without
 * Python. */
#include "timed_wait.h"

#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <time.h>

#include "sharepod/protocol.h"

enum { EVENTS_MOST = 64, NS_IN_MS = 1000000 };

static const int64_t NS_IN_S = 1000000000;
/* Time for which the wait continues after a hand-off, before Python records it. The next tenant's process may need
 * this processor at once, and the record can wait. */
static const int64_t REST_NS = 100000;
/* Longest time between two checks of a tenant, because a program's report of when its work ends may be wrong. */
static const int64_t PUT_OFF_NS = 20000000;

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

/* Wait once, without checks and hand-offs. Arguments and result as for `shp_timed_wait`. */
static int wait_once(int poller, int timer, int64_t timeout_ns, shp_ready *ready, int most) {
    struct epoll_event events[EVENTS_MOST];
    int ms = milliseconds(timeout_ns);
    if (timer >= 0 && timeout_ns > 0) {
        struct itimerspec at = {
            .it_value = {.tv_sec = (time_t)(timeout_ns / NS_IN_S), .tv_nsec = (long)(timeout_ns % NS_IN_S)}};
        if (timerfd_settime(timer, 0, &at, NULL) == 0 && ms < INT_MAX)
            ms++; /* the timer ends the wait; this later timeout only covers a timer that fails */
    }
    int count = epoll_wait(poller, events, most < EVENTS_MOST ? most : EVENTS_MOST, ms);
    if (count < 0)
        return -errno;
    for (int i = 0; i < count; i++)
        ready[i] = (shp_ready){.descriptor = events[i].data.fd, .events = events[i].events};
    return count;
}

/* Return the time of a process's last heartbeat, at most `now`. The time stamp may appear to be slightly in the future,
 * because the clock offset is inexact; it then counts as given now. A time far in the future is ignored. */
static int64_t heard(const shp_beat *beat, const struct shp_pulse *pulse, int64_t now) {
    uint64_t written = __atomic_load_n(&pulse->beat_at, __ATOMIC_RELAXED);
    int64_t at = (int64_t)(written + (uint64_t)beat->offset);
    if (at > now)
        at = at - now > beat->patience ? beat->since : now;
    return at > beat->since ? at : beat->since;
}

/* Return the time from which the silence of a process matters: `ahead` before the end of its launched work. If it
 * reports no end, INT64_MIN: always. */
static int64_t matters(const shp_beat *beat, const struct shp_pulse *pulse) {
    uint64_t ends_at = __atomic_load_n(&pulse->ends_at, __ATOMIC_RELAXED);
    if (__atomic_load_n(&pulse->grant_id, __ATOMIC_RELAXED) == 0 || ends_at == 0)
        return INT64_MIN;
    return (int64_t)(ends_at + (uint64_t)beat->offset - (uint64_t)beat->ahead);
}

/* Check all watched tenants. Return true if none is silent, and set the next check: the earliest time at which a
 * tenant could be silent and its work nearly over. */
static bool all_alive(shp_silence_watch *silence_watch, int64_t now) {
    int64_t due = INT64_MAX;
    for (int i = 0; i < silence_watch->count;) {
        int32_t tenant = silence_watch->beats[i].tenant;
        int64_t silent_at = INT64_MIN, missed_at = INT64_MIN;
        bool any = false;
        for (; i < silence_watch->count && silence_watch->beats[i].tenant == tenant; i++) {
            const shp_beat *beat = &silence_watch->beats[i];
            const struct shp_pulse *pulse = (const struct shp_pulse *)beat->pulse;
            if (pulse == NULL)
                continue;
            int64_t patient = heard(beat, pulse, now) + beat->patience, missed = matters(beat, pulse);
            silent_at = patient > silent_at ? patient : silent_at;
            missed_at = missed > missed_at ? missed : missed_at;
            any = true;
        }
        if (!any)
            continue;
        int64_t look = missed_at > silent_at ? missed_at : silent_at;
        if (look <= now)
            return false;
        look = look - now < PUT_OFF_NS ? look : now + PUT_OFF_NS;
        due = look < due ? look : due;
    }
    silence_watch->due = due;
    return true;
}

static int64_t next_look(const shp_silence_watch *silence_watch) {
    return silence_watch->count > 0 && !silence_watch->silent ? silence_watch->due : INT64_MAX;
}

/* Check the tenants and ring the alarm, if either is due. Return whether Python must be woken. */
static bool looked_after(shp_silence_watch *silence_watch, int64_t now) {
    bool silent = next_look(silence_watch) <= now && !all_alive(silence_watch, now),
         rings = silence_watch->alarm <= now;
    if (silent)
        silence_watch->silent = 1;
    if (rings) {
        silence_watch->alarm = INT64_MAX;
        silence_watch->rang = 1;
    }
    return silent || rings;
}

/* Do what `shp_timed_wait` does, except that a signal gives -EINTR. */
static int wait_and_look(int poller, int timer, int64_t timeout_ns, shp_ready *ready, int most,
                         shp_silence_watch *silence_watch, shp_hand_offs *hand_offs) {
    if (hand_offs->made > 0)
        timeout_ns = 0;
    int64_t now = monotonic(), end = timeout_ns < 0 ? INT64_MAX : now + timeout_ns;
    for (;;) {
        int64_t look = next_look(silence_watch), own = silence_watch->alarm < look ? silence_watch->alarm : look;
        int64_t until = own < end ? own : end, left = until > now ? until - now : 0;
        int exact = own < end ? (left < SHP_EXACT_NS ? silence_watch->timer : -1) : timer;
        int count = wait_once(poller, exact, until == INT64_MAX ? -1 : left, ready, most - 1);
        if (count < 0)
            return count;
        bool only_timer = count == 1 && ready[0].descriptor == silence_watch->timer;
        if (count > 0 && !only_timer && shp_hand_on(hand_offs) > 0) {
            count = wait_once(poller, -1, 0, ready, most - 1); /* poll again: the hand-offs have read from sockets
                                                                * that were reported as ready */
            if (count < 0)
                return count;
            int64_t rested = monotonic() + REST_NS;
            if (rested < end) {
                end = rested;
                timer = silence_watch->timer;
            }
        }
        now = monotonic();
        if (looked_after(silence_watch, now)) {
            ready[count] = (shp_ready){.descriptor = silence_watch->descriptor, .events = EPOLLIN};
            return count + 1;
        }
        if ((count > 0 && !only_timer) || now >= end)
            return count;
    }
}

int shp_timed_wait(int poller, int timer, int64_t timeout_ns, shp_ready *ready, int most,
                   shp_silence_watch *silence_watch, shp_hand_offs *hand_offs) {
    int count = wait_and_look(poller, timer, timeout_ns, ready, most, silence_watch, hand_offs);
    return count == -EINTR ? 0 : count;
}
