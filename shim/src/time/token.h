/* State machine of the token: it decides when the gate is open. Only the hook thread runs it.
 *
 * Guarantees:
 * - T1 open only by right: with an agent, the gate is open only while a grant is held. Without an agent it is open only
 *   in the part of each period that is the tenant's request (the duty cycle).
 * - T2 one DRAINED per grant, in order: the hook sends DRAINED after it has closed the gate (G1, gate.h) and all work
 *   launched under the grant has finished, except by D6 (drain.h). A thread that stays inside a launch delays DRAINED
 * by at most the grace period, and by LATE (token.c) once all other work has finished. The next drain waits for the
 * work of that launch. After the hook has left the driver, in exit handlers of the program, a launch counts as finished
 * when its thread has left it (P4, passage.h).
 * - T3 no deadlock by an unfinished drain: if a drain takes longer than the grace period while a thread waits at the
 *   gate, the hook requests the token again. The unfinished work may be waiting for that thread's launch. A grant that
 *   then arrives, or a kept grant (T5), replaces the earlier grant.
 * - T4 barred: the hook drains a grant at once when the agent has barred it (G5, gate.h). If the process cannot drain
 *   at once, it reports that it runs again. From that report on the tenant is charged.
 * - T5 kept: while a grant is revoked or drains, another grant that arrives is kept. It is applied once DRAINED of the
 *   first grant is sent. If the kept grant has expired or was revoked by then, its DRAINED is sent without an opening
 *   of the gate.
 * - T6 promoted: while the gate is open by a grant, a grant with another id replaces that grant. The gate stays open,
 *   and DRAINED is sent only for the new id.
 */
#ifndef SHAREPOD_TOKEN_H
#define SHAREPOD_TOKEN_H

#include <stdbool.h>
#include <stdint.h>

#include "session/session.h"
#include "sharepod/protocol.h"
#include "tenant/gpus.h"
#include "time/gate/gate.h"
#include "time/samples.h"
#include "time/streams.h"

enum token_state {
    TOKEN_NONE,    /* the token is not held, and not requested */
    TOKEN_WANTED,  /* the token is requested: WANT was sent */
    TOKEN_HELD,    /* the gate is open */
    TOKEN_CLOSING, /* the gate is closed; threads may still be inside launches */
    TOKEN_DRAINING /* the hook no longer waits for threads inside launches, but launched work is unfinished */
};

/* Content of a GRANT. */
struct grant_terms {
    uint64_t grant_id;
    uint64_t deadline; /* end of the grant; 0: revoked, SYS_NEVER: none is known */
    bool metered;      /* the queue of unfinished work must be short */
    bool announce;     /* the hook may send DRAINING */
    bool prompt;       /* the token is released as soon as the work has finished */
    bool keeps_short;  /* each launch passes only shortly before the earlier work ends (Q5, meter.h) */
    bool concurrent;   /* the hook must sample the progress */
};

/* Points in time are values of sys_now(), ns; 0: not set, unless noted otherwise. */
struct token {
    /* Set before token_register: */
    struct gate *gate;
    struct streams *streams;
    struct session *session;
    struct gpus *gpus;
    const char *directory; /* directory of the file `limits` */

    enum token_state state;
    bool local;     /* the duty cycle holds the token, without an agent */
    bool metered;   /* the queue of unfinished work must be short */
    bool announce;  /* the hook may send DRAINING */
    bool unbounded; /* launches passed without metering, or before an overdue drain had ended: the end of the work is
                       not known */
    bool returned;  /* the agent has barred the gate, and the hook has reported that this process runs again */
    uint64_t barred_at;  /* time at which the hook last found the gate barred */
    bool prompt;         /* the token is released as soon as the work has finished */
    bool concurrent;     /* the progress is sampled while the grant is held or drains */
    bool without_driver; /* the driver is about to end: the hook no longer waits for GPU work */
    bool self_drained;   /* the gate was opened after the driver began to end: each thread waits for its own launches */
    uint64_t grant_id;   /* of the last grant */
    uint64_t deadline;   /* end of the grant; 0: close at once, SYS_NEVER: none is known */
    struct grant_terms kept; /* terms of the grant that is applied after the drain (T5) */
    bool keeps;              /* `kept` contains a grant */
    struct samples samples;

    /* In state TOKEN_HELD, the use of the token: */
    bool idle;          /* the token is released because nothing was launched */
    bool quiet;         /* no launch since the last check, and events are recorded behind earlier launches */
    bool ended;         /* the earlier launches had also finished at the last check */
    uint64_t opened;    /* time of the opening */
    uint64_t launches;  /* number of launches that had left the gate at the opening */
    uint64_t seen;      /* number of launches that had begun at the last check */
    uint64_t looked;    /* time of the last check */
    uint64_t next_look; /* time of the next check */

    /* In states TOKEN_CLOSING and TOKEN_DRAINING: */
    uint64_t patience;      /* ns for which to wait for threads inside a launch; counts down while this process runs */
    uint64_t last_step;     /* time of the last step in TOKEN_CLOSING */
    uint64_t drain_started; /* time at which the gate was closed */
    uint64_t expected;      /* expected end of the drain; 0: not known */
    uint64_t announce_at;   /* time at which to send DRAINING; SYS_NEVER: DRAINING is not sent */
    uint64_t next_poll;     /* time of the next check whether the work has finished */
    uint64_t last_poll;     /* time of the last check that found the work unfinished; 0: no such check */
    bool cleared;           /* all threads have left their launches; false: `patience` was used up first */
    uint64_t drained_launches; /* number of launches that had left the gate when the drain's events were recorded */
    uint64_t late_until; /* time until which threads inside a launch are waited for; 0: other work is unfinished */
    uint64_t next_ask;   /* time at which the token is requested again (T3) */
    bool asked;          /* the token was requested again */

    /* The duty cycle, without an agent: */
    uint64_t phase;       /* ns, see struct limits; set before token_register */
    uint64_t window_end;  /* end of the present window */
    uint64_t debt;        /* ns for which work ran after the ends of its grants */
    uint64_t paid_window; /* start of the last window that was shortened to pay `debt` */
    uint64_t next_limits; /* time at which the file `limits` is read again */
};

/* Register the handlers of GRANT and REVOKE with the session, and a listener of the connection. Call this before the
 * hook thread starts. */
void token_register(struct token *token);

/* Make the next step close the gate if it is open. Called when the program ends. */
void token_give_back(struct token *token);
/* Write the pulse page: that this process runs, the expected end of its work, and the results of the samples. */
void token_beat(const struct token *token, uint64_t now);
/* Return whether launched work is being drained, or is about to be. */
bool token_drains(const struct token *token);

/* Take a sample of the progress if one is due. Return the time of the next sample; SYS_NEVER: no sample is planned. */
uint64_t token_sample(struct token *token, uint64_t now);
/* Make the steps that are due. Return the latest time of the next call; SYS_NEVER: the next call is due when a frame
 * arrives. */
uint64_t token_step(struct token *token, uint64_t now);

#endif
