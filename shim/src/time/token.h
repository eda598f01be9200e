/* The token: when the gate is open. A state machine that the hook thread steps.
 *
 * Guarantees: the gate is open only while a grant of the agent is held or, without an agent, in the part of each
 * period that is the tenant's request; DRAINED is sent once for each grant, after the gate was closed, no thread was
 * inside a launch (or the grace period had passed) and all work launched under it had finished. Where that takes longer
 * than the grace period while a thread waits at the gate, the token is asked for once more: what is unfinished may wait
 * for what that thread would launch. A grant that comes then takes the place of the one before.
 */
#ifndef SHAREPOD_TOKEN_H
#define SHAREPOD_TOKEN_H

#include <stdbool.h>
#include <stdint.h>

#include "session/session.h"
#include "sharepod/protocol.h"
#include "tenant/gpus.h"
#include "time/gate.h"
#include "time/streams.h"

enum token_state { TOKEN_NONE, TOKEN_WANTED, TOKEN_HELD, TOKEN_CLOSING, TOKEN_DRAINING };

struct token {
    struct gate *gate;
    struct streams *streams;
    struct session *session;
    struct gpus *gpus;
    const char *directory; /* of the file `limits` */
    enum token_state state;
    bool local; /* by the file `limits`, no agent */
    bool metered;
    bool announce; /* DRAINING may be sent */
    bool idle;     /* given back because nothing was launched */
    bool quiet;    /* nothing launched since the last look, and events are recorded behind what was */
    uint64_t grant_id;
    uint64_t deadline; /* of the grant */
    uint64_t opened;
    uint64_t launches; /* at its beginning */
    uint64_t seen;     /* at the last look */
    uint64_t next_look;
    uint64_t patience;  /* with threads inside a launch; of the time that this process runs */
    uint64_t last_step; /* of closing */
    uint64_t drain_started;
    uint64_t next_ask; /* when the token is asked for once more, if the drain lasts and a thread waits */
    bool asked;        /* it was */
    uint64_t expected; /* when the drain is expected to end; 0: not known */
    uint64_t announce_at;
    uint64_t next_poll;
    uint64_t drained_launches; /* that the recorded events are behind */
    /* Without an agent. */
    uint64_t phase, window_end, debt;
    uint64_t paid_window; /* the beginning of the last window that made up for debt */
    uint64_t next_limits; /* when the file is read again */
};

/* Before the hook thread runs: registers the handlers of GRANT and REVOKE, and to be told of the connection. The first
 * five fields and `phase` are set. */
void token_register(struct token *token);

/* Does what is due; returns when it wants to be called again at the latest. */
uint64_t token_step(struct token *token, uint64_t now);

#endif
