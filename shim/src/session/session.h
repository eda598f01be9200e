/* The connection to the daemon: one per process, made again whenever it is lost.
 *
 * Frames are received by the agent thread alone. Any thread may send, and may ask for memory and wait for the answer.
 */
#ifndef SHAREPOD_SESSION_H
#define SHAREPOD_SESSION_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "sharepod/protocol.h"
#include "base/sys.h"

struct answer {
    bool came; /* else there was no daemon, or it went away meanwhile */
    uint32_t status;
    uint64_t limit, used;
};

enum { SESSION_QUESTIONS = 64 };

struct question {
    _Atomic uint32_t state; /* 0 free, 1 waiting, 2 answered, 3 the connection was lost */
    uint32_t seq;
    int thread; /* that waits for the answer */
    struct answer answer;
};

enum session_state { SESSION_DOWN, SESSION_GREETING, SESSION_READY };

/* Without a connection launches go on by the file `limits`, if the daemon is away; else they wait. */
enum session_shut {
    SESSION_OPEN,
    SESSION_RELEASING, /* the tenant's reservation is ending: for good */
    SESSION_FULL,      /* the tenant has too many processes connected: until the daemon takes this one, or is gone */
    SESSION_EXHAUSTED  /* this process can open no socket: until it can */
};

/* What was last said on standard error about the connection. */
enum session_said { SAID_NOTHING, SAID_AWAY, SAID_REFUSED, SAID_EXHAUSTED };

struct session {
    struct lock lock;         /* for sending, and for the questions */
    _Atomic uint32_t ready;   /* futex: 1 while frames may be sent */
    enum session_state state; /* the agent thread's, as all below */
    uint64_t next_attempt, backoff, greeting_until, patient_until, heard, pinged, looked;
    enum session_shut shut;
    enum session_said said;
    uint32_t grace_ms, gpu_count;
    uint32_t seq;                  /* with the lock */
    const struct shp_hints *hints; /* NULL while none is mapped */
    struct question questions[SESSION_QUESTIONS];
};

/* From any thread. */

/* Makes the agent thread look at what has changed. */
void session_wake(struct session *session);
/* Sends SHP_RESERVE, with these flags, or SHP_MEMINFO for the GPU at `place` and waits for the answer, at most `timeout`
 * ns. */
struct answer session_ask(struct session *session, int type, uint32_t flags, int place, uint64_t value,
                          uint64_t timeout);
/* Sends SHP_RELEASE; false without a connection. With the lock of struct gpus. */
bool session_release(struct session *session, int place, uint64_t bytes, uint32_t flags);
/* Sends SHP_RESERVE of what the driver has taken already, if there is a connection. With the lock of struct gpus. */
void session_grown(struct session *session, int place, uint64_t bytes);

/* For the agent thread. */

/* For the one that is to start it. */
bool session_prepare(struct session *session);
/* Connects if it is time to; drops a daemon that does not answer. */
void session_step(struct session *session, uint64_t now);
/* When session_step has something to do next. */
uint64_t session_deadline(const struct session *session);
/* Waits for frames or session_wake until `deadline`, and handles what came. */
void session_wait(struct session *session, uint64_t deadline);
/* Sends a frame as it is, with the lock; false without a connection. */
bool session_put(const void *frame, uint32_t size);
/* Fills the header and sends; false without a connection. */
bool session_send(struct session *session, void *frame, uint16_t type, uint32_t size);
/* Asks for any answer, to see whether the daemon lives. */
void session_ping(struct session *session, uint64_t now);
bool session_contended(const struct session *session);

/* In a child of fork: closes what it inherited. */
void session_after_fork(void);

#endif
