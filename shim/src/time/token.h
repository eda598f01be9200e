/* The token: the state machine that decides when the gate is open. The hook thread steps it.
 *
 * Guarantees:
 * - T1 open only by right: the gate is open only while a grant of the agent is held or, without an agent, in the part
 *   of each period that is the tenant's request (the duty cycle).
 * - T2 one DRAINED per grant, in order: it is sent after the gate was closed (G1) and all work launched under the grant
 *   has finished. A thread that stays inside a launch delays it by at most the grace period, and by LATE (see token.c)
 *   once all other work has finished. The next drain waits for the work of that launch. Once the hook is out of the
 *   driver, in exit handlers of the program, launches have finished when their threads have left them (P4).
 * - T3 no deadlock by an unfinished drain: if a drain takes longer than the grace period while a thread waits at the
 *   gate, the token is requested once more. The unfinished work may wait for that thread's launch. A grant that comes
 *   then, or that is kept (T5), replaces the former one.
 * - T4 barred: a grant that the agent has barred (G5) is drained at once. A process that cannot drain at once reports
 *   that it runs again: from then on the tenant is charged.
 * - T5 kept: a grant that comes while another one is revoked or drains is kept, and used once the DRAINED of the other
 *   is sent. If its time is over by then, or it was revoked, it is drained without an opening.
 * - T6 promoted: a grant with another id that comes while the gate is open by a grant replaces it: the gate stays open,
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
    TOKEN_NONE,    /* not held, and no thread waits */
    TOKEN_WANTED,  /* asked for: WANT was sent */
    TOKEN_HELD,    /* the gate is open */
    TOKEN_CLOSING, /* the gate is closed, threads may be inside launches still */
    TOKEN_DRAINING /* no thread is inside a launch, work is unfinished */
};

/* Content of a GRANT. */
struct grant_terms {
    uint64_t grant_id;
    uint64_t deadline; /* end of the grant; 0: revoked, SYS_NEVER: none is known */
    bool metered;      /* the queue of unfinished work must be short */
    bool announce;     /* DRAINING may be sent */
    bool prompt;       /* it is released as soon as the work has ended */
    bool keeps_short;  /* launches are to be just in time (Q5 of meter.h) */
    bool concurrent;   /* progress must be sampled */
};

/* Points in time are sys_now()'s, ns; 0: not set, unless stated otherwise. */
struct token {
    /* Set before token_register. */
    struct gate *gate;
    struct streams *streams;
    struct session *session;
    struct gpus *gpus;
    const char *directory; /* of the file `limits` */

    enum token_state state;
    bool local;          /* held by the duty cycle, no agent */
    bool metered;        /* the queue of unfinished work must be short */
    bool announce;       /* DRAINING may be sent */
    bool unbounded;      /* launched into without metering, or before a drain that is overdue: its end is not known */
    bool returned;       /* the agent has barred the gate and has the report that this process runs again */
    uint64_t barred_at;  /* when that was last so */
    bool prompt;         /* it is released as soon as the work has ended */
    bool concurrent;     /* progress is sampled while the grant is held or drains */
    bool without_driver; /* the driver is about to end: nothing is drained any more */
    bool self_drained;   /* opened after that: threads wait for their own launches */
    uint64_t grant_id;   /* of the last grant */
    uint64_t deadline;   /* end of the grant; 0: close at once, SYS_NEVER: none is known */
    struct grant_terms kept; /* of the grant that is taken up after the drain (T5) */
    bool keeps;              /* there is one */
    struct samples samples;

    /* TOKEN_HELD: whether it is used. */
    bool idle;          /* it is released because nothing was launched */
    bool quiet;         /* no launches since the last check, and events are recorded behind earlier ones */
    bool ended;         /* and the earlier launches had finished at the last check */
    uint64_t opened;    /* when */
    uint64_t launches;  /* that had entered when it was opened */
    uint64_t seen;      /* number of launches begun up to the last check */
    uint64_t looked;    /* when that was */
    uint64_t next_look; /* time of the next check of its use */

    /* TOKEN_CLOSING and TOKEN_DRAINING. */
    uint64_t patience;         /* ns left for threads inside a launch; of the time that this process runs */
    uint64_t last_step;        /* of closing */
    uint64_t drain_started;    /* when the gate was closed */
    uint64_t expected;         /* when the drain is expected to end; 0: not known */
    uint64_t announce_at;      /* when DRAINING is sent; SYS_NEVER: not */
    uint64_t next_poll;        /* time of the next check whether the work has finished */
    uint64_t last_poll;        /* last check at which it had not; 0: no check yet */
    bool cleared;              /* all threads had left their launches; else the patience was over */
    uint64_t drained_launches; /* launches that had left when events were recorded */
    uint64_t late_until;       /* until when threads are waited for that are inside a launch; 0: the work is not done */
    uint64_t next_ask;         /* when the token is asked for once more (T3) */
    bool asked;                /* it was */

    /* The duty cycle, without an agent. */
    uint64_t phase;       /* ns, see struct limits; set before token_register */
    uint64_t window_end;  /* end of the present window */
    uint64_t debt;        /* ns that work ran beyond the ends of windows */
    uint64_t paid_window; /* the beginning of the last window that made up for debt */
    uint64_t next_limits; /* when the file `limits` is read again */
};

/* Register the handlers of GRANT and REVOKE with the session, and listen to its connection. Before the hook thread
 * runs. */
void token_register(struct token *token);

/* Close the gate with the next step, if it is open: the program ends. */
void token_give_back(struct token *token);
/* Write the pulse page: this process runs, the expected end of its work, and the results of the samples. */
void token_beat(const struct token *token, uint64_t now);
/* Return whether a drain of launched work is in progress. */
bool token_drains(const struct token *token);

/* Take a sample of the progress if one is due. Return when the next one is; SYS_NEVER: none. */
uint64_t token_sample(struct token *token, uint64_t now);
/* Make the due steps. Return the latest moment of the next call; SYS_NEVER: when a frame has come. */
uint64_t token_step(struct token *token, uint64_t now);

#endif
