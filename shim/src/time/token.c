/* State machine of the token: NONE -> WANTED -> HELD -> CLOSING -> DRAINING -> NONE or WANTED. Without an agent the
 * duty cycle makes the step NONE -> HELD.
 *
 * Only the hook thread runs it, without a lock. Other threads see its state through the gate.
 */
#include "time/token.h"

#include <string.h>

#include "base/sys.h"
#include "tenant/limits.h"
#include "time/drain.h"
#include "time/queue/meter.h"

/* Version of the protocol that introduced SHP_GRANT_CONCURRENT and the counters in the pulse page. */
#define CONCURRENT_VERSION 3

/* All in ns. */
/* Time between two checks of a token that other tenants wait for. It is released if no launch came in between and all
 * work has ended. */
#define LOOK_CONTENDED (SYS_MS / 2)
/* Time between two checks of a prompt token, which is released if both checks find it idle. */
#define LOOK_PROMPT (100 * 1000ull)
#define LOOK_ALONE (50 * SYS_MS) /* time between two checks while no tenant waits: an idle token then costs nothing */
/* Time between two checks of work that a drain has left behind a wait of the program. */
#define LOOK_LEFT (5 * SYS_MS)
#define PERIOD (100 * SYS_MS) /* period of the duty cycle: as long as the agent's longest quantum */
#define LOCAL_LEAST SYS_MS    /* shortest window for which the gate is opened */
/* Time after the gate opens for which the token is kept for threads that waited at the gate and have not launched. */
#define WAKING (200 * SYS_MS)
#define AHEAD SYS_MS              /* DRAINING is sent this long before the expected end: about the time of a hand-off */
#define POLL_LEAST (50 * 1000ull) /* time between two polls of a drain that is about to end */
#define POLL_MOST (2 * SYS_MS)    /* time between two polls of a longer drain */
/* Most of a pause between two steps that counts against `patience`: in a longer pause this process had no CPU. */
#define STOPPED (10 * POLL_MOST)
/* A launch that slept in a full queue of the driver has passed this long after the queue has room. */
#define LATE (5 * SYS_MS)
#define ASK_EACH (100 * SYS_MS) /* time between two requests for the token during an overdue drain (T3) */
#define BARRED (250 * SYS_MS)   /* a waiting process reports that it runs for this long after its gate was barred */
#define OVERDUE (5 * SYS_MS)    /* after this time beyond its expected end, the end of a drain counts as not known */

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

/* Return whether a thread waits at the closed gate. */
static bool wanted(const struct token *token) {
    return gate_wanted(token->gate);
}

/* Open the gate until `deadline`. */
static void hold(struct token *token, uint64_t now, uint64_t deadline, bool metered, bool local) {
    struct gate *gate = token->gate;
    token->state = TOKEN_HELD;
    token->local = local;
    token->prompt &= !local;
    token->concurrent &= !local;
    if (local)
        atomic_store(&gate->keeps_short, false);
    token->metered = metered;
    token->idle = token->quiet = token->ended = token->asked = token->returned = false;
    token->unbounded = !metered;
    token->self_drained = token->without_driver;
    token->deadline = deadline;
    token->opened = token->looked = now;
    token->launches = token->seen = gate_finished(gate); /* threads at the closed gate step back and do not count */
    token->next_look = now + LOOK_CONTENDED * 2;         /* a thread that waited needs a moment to launch */
    gate_open(gate, metered, deadline, local ? GATE_NO_GRANT : token->grant_id);
}

/* Close the gate. Threads inside launches have the grace period to leave. */
static void close(struct token *token, uint64_t now) {
    uint32_t grace_ms = token->session->grace_ms;
    gate_close(token->gate);
    token->state = TOKEN_CLOSING;
    token->patience = (grace_ms ? grace_ms : 1000) * SYS_MS;
    token->next_ask = now + token->patience;
    token->last_step = now;
    token->drain_started = now;
    token->expected = 0;
    token->next_poll = now;
}

/* Send DRAINED. Return false if there is no connection, or the socket is full because the agent does not read. */
static bool send_drained(const struct token *token, uint64_t grant_id, uint64_t launches, uint32_t flags) {
    struct shp_drained frame;
    memset(&frame, 0, sizeof frame);
    frame.grant_id = grant_id;
    frame.launches = launches;
    frame.flags = flags;
    return session_send(token->session, &frame, SHP_DRAINED, sizeof frame);
}

static struct grant_terms terms_of(const struct token *token, const struct shp_grant *grant) {
    uint64_t now = sys_now(), quantum = grant->quantum_ns;
    return (struct grant_terms){
        .grant_id = grant->grant_id,
        .deadline = quantum == 0 || quantum > SYS_NEVER - now ? SYS_NEVER : now + quantum,
        .metered = (grant->flags & SHP_GRANT_METERED) != 0,
        .announce = (grant->flags & SHP_GRANT_ANNOUNCE) != 0,
        .prompt = (grant->flags & SHP_GRANT_PROMPT) != 0,
        .keeps_short = (grant->flags & SHP_GRANT_SHORT) != 0,
        .concurrent = (grant->flags & SHP_GRANT_CONCURRENT) != 0 && token->session->version >= CONCURRENT_VERSION,
    };
}

/* Apply these terms from now on. */
static void set_terms(struct token *token, const struct grant_terms *terms) {
    token->grant_id = terms->grant_id;
    token->announce = terms->announce;
    token->prompt = terms->prompt;
    token->concurrent = terms->concurrent;
    atomic_store(&token->gate->keeps_short, terms->keeps_short);
}

/* Apply a grant: open the gate. */
static void take_up(struct token *token, const struct grant_terms *terms) {
    set_terms(token, terms);
    hold(token, sys_now(), terms->deadline, terms->metered, false);
}

/* Apply a grant before the work of the earlier grant has drained (T3). */
static void replace(struct token *token, const struct grant_terms *terms) {
    uint64_t launches = token->launches; /* also counts launches of the earlier grant */
    take_up(token, terms);
    token->launches = launches;
    token->unbounded = true;
}

/* Return a grant under which nothing was launched. */
static void give_back_unused(struct token *token, uint64_t grant_id) {
    bool waits = wanted(token),
         sent = send_drained(token, grant_id, 0, SHP_DRAINED_IDLE | (waits ? SHP_DRAINED_WANT : 0));
    if (waits && sent && token->state == TOKEN_NONE)
        token->state = TOKEN_WANTED;
}

/* Keep a grant until the present grant has drained (T5). */
static void keep(struct token *token, const struct grant_terms *terms) {
    if (token->keeps && token->kept.grant_id != terms->grant_id)
        give_back_unused(token, token->kept.grant_id);
    token->kept = *terms;
    token->keeps = true;
}

/* Handler of GRANT. Depending on the state, the grant opens the gate, extends, renews or replaces the present grant, is
 * kept until the end of a drain, or is returned at once. */
static bool granted(void *of, const void *frame, const int *descriptors) {
    struct token *token = of;
    const struct shp_grant *grant = frame;
    (void)descriptors;
    struct grant_terms terms = terms_of(token, grant);
    bool same = token->grant_id == terms.grant_id, held = token->state == TOKEN_HELD && !token->local;
    if ((grant->flags & SHP_GRANT_RENEWS) && !(token->keeps && token->kept.grant_id == terms.grant_id) &&
        !(held && same))
        return true;                              /* the frame has crossed with DRAINED */
    if (held && (same || token->deadline != 0)) { /* the grant is extended, renewed or promoted (T6) */
        set_terms(token, &terms);
        token->deadline = terms.deadline;
        token->metered = terms.metered;
        token->unbounded |= !terms.metered;
        gate_prolong(token->gate, terms.metered, terms.deadline, terms.grant_id);
    } else if (token->state == TOKEN_WANTED) {
        take_up(token, &terms);
    } else if (token->asked && !token->local && !same) {
        replace(token, &terms);
    } else if (token->state >= TOKEN_HELD && !token->local && !same) {
        keep(token, &terms);
    } else if (token->local || !same) { /* the token was not requested */
        give_back_unused(token, terms.grant_id);
    }
    return true;
}

/* Handler of REVOKE: the next step closes the gate. If the revoked grant is the kept one, it will not open the gate. */
static bool revoked(void *of, const void *frame, const int *descriptors) {
    struct token *token = of;
    const struct shp_revoke *revoke = frame;
    (void)descriptors;
    if (token->keeps && token->kept.grant_id == revoke->grant_id)
        token->kept.deadline = 0;
    else if (token->state == TOKEN_HELD && !token->local && token->grant_id == revoke->grant_id)
        token->deadline = 0;
    return true;
}

/* The connection is ready: close the gate if the duty cycle holds it open. From now on the agent decides. */
static void connected(void *of) {
    struct token *token = of;
    samples_begin(&token->samples, token->gate);
    if (token->state == TOKEN_HELD)
        token->deadline = 0;
}

/* The connection is lost: close the gate if a grant holds it open. From now on the duty cycle opens it. */
static void disconnected(void *of, bool was_ready) {
    struct token *token = of;
    if (was_ready && token->state == TOKEN_HELD)
        token->deadline = 0;
    if (token->state == TOKEN_WANTED)
        token->state = TOKEN_NONE;
    token->local = true; /* there is no agent to which the drain could be reported */
    token->keeps = token->concurrent = false;
    token->next_limits = 0;
}

void token_register(struct token *token) {
    session_route(token->session, SHP_GRANT, sizeof(struct shp_grant), granted, token);
    session_route(token->session, SHP_REVOKE, sizeof(struct shp_revoke), revoked, token);
    token->session->listener = (struct session_listener){connected, disconnected, token};
}

/* Read the file `limits` again, once a second. */
static void follow_limits(struct token *token, uint64_t now) {
    struct limits limits;
    if (now < token->next_limits)
        return;
    token->next_limits = now + SYS_SECOND;
    if (!limits_read(token->directory, &limits))
        return;
    lock(&token->gpus->lock);
    gpus_learn(token->gpus, limits.gpus, limits.count, false);
    unlock(&token->gpus->lock);
}

/* The duty cycle. All processes of the tenant open the gate in the same part of each period, so ranks that wait for
 * each other make progress. Work beyond the end of a window shortens the following windows. Tenants have different
 * phases. */
static uint64_t step_local(struct token *token, uint64_t now) {
    follow_limits(token, now);
    if (token->session->admission != ADMITTED || !wanted(token))
        return SYS_NEVER;
    if (now < token->session->patient_until) /* an agent that runs answers within this time */
        return token->session->patient_until;
    uint64_t request = gpus_request(token->gpus);
    if (request == 0)
        return token->next_limits;
    uint64_t start = now - (now + token->phase) % PERIOD, length = PERIOD * request / 1000, end = start + length;
    if (request >= 1000 || gpus_ungated(token->gpus)) {
        hold(token, now, SYS_NEVER, false, true);
        return now;
    }
    if (token->paid_window == start) /* this window has already paid as much debt as it can */
        return start + PERIOD;
    if (token->debt > 0 &&
        now < end) { /* the debt is paid by keeping the gate closed for a part of a window, or for a whole window */
        uint64_t paid = least(token->debt, end - now);
        token->debt -= paid;
        token->paid_window = start;
        if (end - now - paid < LOCAL_LEAST)
            return start + PERIOD;
        end -= paid;
    }
    if (now + LOCAL_LEAST > end && !(length < LOCAL_LEAST && now < end))
        return start + PERIOD;
    token->window_end = end;
    hold(token, now, end, true, true);
    return now;
}

static bool send_want(const struct token *token) {
    struct shp_want frame;
    struct session *session = token->session;
    memset(&frame, 0, sizeof frame);
    frame.gpu_mask = (1u << session->gpu_count) - 1;
    return session_send(session, &frame, SHP_WANT, sizeof frame);
}

/* Step in TOKEN_NONE: request the token if a thread waits, or if work runs that the last drain left behind a wait.
 * Without an agent, run the duty cycle. */
static uint64_t step_none(struct token *token, uint64_t now) {
    struct session *session = token->session;
    if (!wanted(token) && !token->without_driver) {
        enum drain_left left = drain_left(token->streams);
        if (left == DRAIN_LEFT_WAITS)
            return now + LOOK_LEFT;
        if (left == DRAIN_LEFT_RUNS)
            gate_want(token->gate, atomic_load(&token->gate->closing));
    }
    if (session->state != SESSION_READY)
        return step_local(token, now);
    if (!wanted(token))
        return SYS_NEVER;
    if (!send_want(token))
        return now + 10 * SYS_MS;
    token->state = TOKEN_WANTED;
    session->heard = now; /* the agent's silence, which leads to a ping, is measured from here */
    return now;
}

/* Return whether a thread waits for the next turn while other tenants wait for this turn to end. */
static bool held_back(const struct token *token, bool contended) {
    return contended && wanted(token);
}

/* Return whether the launched work is expected to end before a hand-off would be complete. */
static bool ends_soon(const struct token *token, uint64_t now) {
    uint64_t end = meter_expected_end(token->gate);
    return end > now && end - now < AHEAD + LOOK_CONTENDED;
}

/* Return the time of the next check whether the token is idle. A prompt token is checked at the expected end of its
 * work. If a thread waits for the next turn, the check is earlier by the time of a hand-off. */
static uint64_t next_look(const struct token *token, uint64_t now, bool contended) {
    uint64_t latest = now + (contended ? LOOK_CONTENDED : LOOK_ALONE), lead = held_back(token, contended) ? AHEAD : 0;
    if (!token->prompt && lead == 0)
        return latest;
    uint64_t end = meter_expected_end(token->gate);
    return least(latest, end > now + LOOK_PROMPT + lead ? end - lead : now + LOOK_PROMPT);
}

/* Return the latest time of the next step. While samples are taken, the step is put off to the next sample, because
 * each wake-up of the hook thread disturbs the program. */
static uint64_t next_step_held(const struct token *token) {
    return least(token->deadline, token->next_look + (token->concurrent && !token->prompt ? SAMPLES_MEAN : 0));
}

/* Step in TOKEN_HELD: close the gate at the deadline, or when nothing is launched and all work has finished. */
static uint64_t step_held(struct token *token, uint64_t now) {
    bool contended = token->metered || session_contended(token->session);
    if (contended && !token->metered && !token->local) { /* another tenant has connected, and must find a short queue */
        token->metered = true;
        gate_prolong(token->gate, true, token->deadline, token->grant_id);
    }
    if (now >= token->deadline || gate_taken(token->gate)) {
        close(token, now);
        return now;
    }
    if (token->local && gpus_ungated(token->gpus)) {
        follow_limits(token, now);
        token->deadline = gpus_ungated(token->gpus) ? SYS_NEVER : 0;
        return least(token->deadline, token->next_limits);
    }
    if (token->local)
        return token->deadline;
    if (now < token->next_look && !(held_back(token, contended) && now >= token->looked + LOOK_PROMPT))
        return next_step_held(token);
    token->looked = now;
    token->next_look = next_look(token, now, contended);
    uint64_t launches = gate_launches(token->gate);
    if (launches != token->seen) {
        token->seen = launches;
        token->quiet = token->ended = false;
    } else if (held_back(token, contended) && ends_soon(token, now) && gate_clear(token->gate)) {
        close(token, now); /* a graph waits for the next turn, so the rest of this turn would be unused */
        return now;
    } else if ((!token->without_driver || token->self_drained) &&
               !gate_waking(token->gate, now > token->opened + WAKING) && gate_clear(token->gate)) {
        if (!token->quiet && !token->self_drained)
            drain_begin(token->streams);
        token->quiet = true;
        bool long_enough = token->ended || !token->prompt;
        token->ended = token->self_drained || drain_poll(token->streams);
        if (token->ended && long_enough) {
            token->idle = true;
            close(token, now);
            return now;
        }
    }
    return next_step_held(token);
}

/* Set the expected end of the drain, and the time of DRAINING, early enough that the agent sends the next grant before
 * the drain ends. */
static void expect_end(struct token *token, uint64_t now) {
    token->expected = meter_expected_end(token->gate);
    token->announce_at = SYS_NEVER;
    if (!token->local && token->announce && token->expected > now)
        token->announce_at = token->expected - least(token->expected - now, AHEAD);
}

/* Send DRAINING. Return false if there is no connection, or the socket is full because the agent does not read. */
static bool announce(struct token *token, uint64_t now) {
    struct shp_draining frame;
    memset(&frame, 0, sizeof frame);
    frame.grant_id = token->grant_id;
    frame.expected_ns = token->expected > now ? token->expected - now : 0;
    token->announce_at = SYS_NEVER;
    return session_send(token->session, &frame, SHP_DRAINING, sizeof frame);
}

/* Step in TOKEN_CLOSING: wait until no thread is inside a launch (G1, gate.h), for at most the grace period. */
static uint64_t step_closing(struct token *token, uint64_t now) {
    /* A pause longer than STOPPED counts as STOPPED, because the threads had no CPU to leave their launches. */
    token->patience -= least(token->patience, least(now - token->last_step, STOPPED));
    token->last_step = now;
    token->cleared = gate_clear(token->gate);
    if (!token->cleared && token->patience > 0)
        return now + POLL_LEAST + least((now - token->drain_started) / 8, POLL_MOST);
    token->drained_launches = gate_finished(token->gate);
    token->late_until = 0;
    if (!token->without_driver)
        drain_begin(token->streams);
    token->state = TOKEN_DRAINING;
    token->last_poll = 0;
    expect_end(token, now);
    return now;
}

/* Return the time of the next poll. Polls are more frequent near the expected end of the work. */
static uint64_t next_poll(const struct token *token, uint64_t now) {
    uint64_t since = token->expected > token->drain_started ? token->expected : token->drain_started,
             off = now > since ? now - since : since - now;
    return now + POLL_LEAST + least(off / 8, POLL_MOST);
}

/* Add work beyond the end of the duty cycle's window to the debt, up to 10 s. */
static void run_over(struct token *token, uint64_t now) {
    if (now > token->window_end && token->window_end != 0)
        token->debt = least(token->debt + (now - token->window_end), 10 * SYS_SECOND);
    token->window_end = 0;
}

/* Apply the kept grant after the earlier grant has drained, or return it if it has expired (T5). */
static void take_up_kept(struct token *token, uint64_t now) {
    token->keeps = false;
    if (token->kept.deadline > now)
        take_up(token, &token->kept);
    else
        give_back_unused(token, token->kept.grant_id);
}

/* All work has finished: send DRAINED (T2). If the socket is full because the agent does not read, send it later.
 * Without DRAINED the process would wait for a grant indefinitely, and the agent for the process's work. */
static void finish(struct token *token, uint64_t now) {
    bool waits = wanted(token) && !token->keeps,
         idle = token->idle && !waits && gate_launches(token->gate) == token->seen;
    /* A thread that arrives at the closed gate steps back, and must not be counted. A thread inside an earlier launch
     * must be counted. */
    uint64_t launches = token->cleared ? gate_finished(token->gate) : gate_launches(token->gate);
    uint32_t flags = (waits ? SHP_DRAINED_WANT : 0) | (idle ? SHP_DRAINED_IDLE : 0);
    if (token->concurrent) /* the agent assigns these launches to this hold */
        samples_count(&token->samples, token->gate);
    token_beat(token, now);
    if (!token->local && !send_drained(token, token->grant_id, launches - token->launches, flags)) {
        token->next_poll = now + POLL_MOST;
        token->announce_at = SYS_NEVER;
        return;
    }
    drain_end(token->streams, token->cleared || token->without_driver);
    atomic_store(&token->gate->undrained, token->last_poll);
    atomic_store(&token->gate->drained, now);
    token->state = TOKEN_NONE;
    token->asked = false;
    if (token->local) {
        run_over(token, now);
    } else if (token->keeps) {
        take_up_kept(token, now);
    } else if (waits) {
        token->state = TOKEN_WANTED;
        token->session->heard = now;
    }
}

/* If the drain is overdue and a thread waits at the gate, apply the kept grant, or request the token again (T3).
 * Without an agent, use the windows of the duty cycle again. The unfinished work stays registered, and the next drain
 * waits for it. */
static void ask_again(struct token *token, uint64_t now) {
    if (now < token->next_ask || !wanted(token))
        return;
    token->next_ask = now + ASK_EACH;
    if (token->keeps && token->kept.deadline > now) {
        token->keeps = false;
        replace(token, &token->kept);
    } else if (token->local) {
        token->state = TOKEN_NONE;
        run_over(token, now);
    } else if (send_want(token)) {
        token->asked = true;
    }
}

/* All work has finished, but threads may be inside launches. Return whether to wait: for these threads, or for the work
 * of launches that have passed since the drain began. */
static bool awaits_late(struct token *token, uint64_t now) {
    if (token->cleared || token->without_driver)
        return false;
    token->cleared = gate_clear(token->gate);
    uint64_t launches = gate_finished(token->gate);
    if (token->cleared || launches != token->drained_launches) {
        token->drained_launches = launches;
        token->late_until = 0;
        drain_begin(token->streams);
        return true;
    }
    if (token->late_until == 0)
        token->late_until = now + LATE;
    return now < token->late_until;
}

/* Step in TOKEN_DRAINING: poll until all work has finished. */
static uint64_t step_draining(struct token *token, uint64_t now) {
    if (now < token->next_poll && now < token->announce_at)
        return least(token->next_poll, token->announce_at);
    bool drained = token->without_driver ? token->self_drained && gate_clear(token->gate) : drain_poll(token->streams);
    if (!drained) {
        if (now >= token->announce_at)
            announce(token, now);
        token->last_poll = now;
        token->next_poll = next_poll(token, now);
        ask_again(token, now);
        return token->state == TOKEN_DRAINING ? least(token->next_poll, token->announce_at) : now;
    }
    if (awaits_late(token, now))
        return token->next_poll = now + POLL_LEAST;
    finish(token, now);
    return now;
}

void token_give_back(struct token *token) {
    if (token->state == TOKEN_HELD)
        token->deadline = 0;
}

bool token_drains(const struct token *token) {
    return token->state == TOKEN_CLOSING || token->state == TOKEN_DRAINING ||
           (token->state == TOKEN_HELD && token->deadline == 0);
}

/* Return when the work launched so far is expected to end; 0: not known. */
static uint64_t known_end(const struct token *token, uint64_t now) {
    uint64_t end = meter_expected_end(token->gate);
    bool overdue = token->state == TOKEN_DRAINING && now > end + OVERDUE && now > token->drain_started + OVERDUE;
    return token->unbounded || overdue || meter_end_unknown(token->gate) ? 0 : end + (end == 0);
}

/* Return whether this process reports, while it waits for the token, that it runs. The agent then need not grant time
 * to a process that is stopped repeatedly and cannot use it. */
static bool shows_waiting(const struct token *token, uint64_t now) {
    return token->state == TOKEN_WANTED && token->barred_at != 0 && now - token->barred_at < BARRED;
}

void token_beat(const struct token *token, uint64_t now) {
    struct shp_pulse *pulse = token->session->pulse;
    if (pulse == NULL)
        return;
    bool holds = !token->local && token->state >= TOKEN_HELD;
    uint64_t ends_at = holds ? known_end(token, now) : shows_waiting(token, now) ? now : 0;
    atomic_store_explicit((_Atomic uint64_t *)&pulse->ends_at, ends_at, memory_order_relaxed);
    atomic_store_explicit((_Atomic uint64_t *)&pulse->grant_id, holds ? token->grant_id : 0, memory_order_relaxed);
    if (token->session->version >= CONCURRENT_VERSION) {
        const struct samples *samples = &token->samples;
        atomic_store_explicit((_Atomic uint64_t *)&pulse->samples, samples->taken, memory_order_relaxed);
        atomic_store_explicit((_Atomic uint64_t *)&pulse->in_flight, samples->in_flight, memory_order_relaxed);
        atomic_store_explicit((_Atomic uint64_t *)&pulse->launches, samples->launches, memory_order_relaxed);
        atomic_store_explicit((_Atomic uint64_t *)&pulse->several, samples->several, memory_order_relaxed);
    }
    atomic_store_explicit((_Atomic uint64_t *)&pulse->beat_at, now, memory_order_release);
}

uint64_t token_sample(struct token *token, uint64_t now) {
    if (token->concurrent && !token->local && token->state >= TOKEN_HELD && !token->without_driver)
        return samples_step(&token->samples, token->streams, token->gate, now);
    samples_pause(&token->samples);
    return SYS_NEVER;
}

/* If the agent has barred the gate, report to it that this process runs again (T4). */
static void return_if_barred(struct token *token, uint64_t now) {
    if (token->returned || token->local || token->state < TOKEN_CLOSING || !gate_taken(token->gate))
        return;
    token->barred_at = now;
    token->expected = meter_expected_end(token->gate);
    token->returned = announce(token, now);
}

uint64_t token_step(struct token *token, uint64_t now) {
    return_if_barred(token, now);
    switch (token->state) {
    case TOKEN_NONE: return step_none(token, now);
    case TOKEN_WANTED:
        session_ping(token->session, now);
        return now + (shows_waiting(token, now) ? LOOK_CONTENDED : SYS_SECOND);
    case TOKEN_HELD: return step_held(token, now);
    case TOKEN_CLOSING: return step_closing(token, now);
    case TOKEN_DRAINING: return step_draining(token, now);
    }
    return SYS_NEVER;
}
