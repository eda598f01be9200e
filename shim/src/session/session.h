/* The session: the one connection of the process to the agent. The hook connects again whenever the connection is lost.
 *
 * Guarantees:
 * - SE1 one receiver: only the hook thread receives frames and calls handlers. Any thread may send.
 * - SE2 no unbounded wait for an answer: session_ask ends at its timeout, or when the connection is lost.
 * - SE3 handover first: on a new connection the hook first reports the process's memory and marks the end of that
 *   report. All other requests follow.
 * - SE4 without a connection, launches continue by the file `limits` only if the agent is absent. If the agent refuses
 *   this process, or the process has no descriptor for a socket, they wait (enum session_admission).
 *
 * The session itself sends HELLO, requests and credits. Each package registers handlers for the frames that it
 * receives: frames.c, token.c, credits.c.
 */
#ifndef SHAREPOD_SESSION_H
#define SHAREPOD_SESSION_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/sys.h"
#include "sharepod/protocol.h"
#include "tenant/gpus.h"

/* The agent's answer to a request of session_ask. */
struct answer {
    bool came;            /* false: the agent is absent, or did not answer in time. All other members are then 0 */
    uint32_t status;      /* in an answer to RESERVE: enum shp_reserve_status */
    uint64_t limit, used; /* in an answer to MEMINFO: bytes, of all processes of the tenant */
};

/* Number of threads that may wait for an answer at the same time, one per struct question. A further thread waits until
 * a question is free. */
enum { SESSION_QUESTIONS = 64 };

enum question_state { QUESTION_FREE, QUESTION_WAITING, QUESTION_ANSWERED, QUESTION_LOST };

struct question {
    _Atomic uint32_t state; /* futex: enum question_state; LOST: the connection was lost */
    uint32_t seq;
    int thread; /* id of the thread that waits for the answer */
    struct answer answer;
};

enum session_state { SESSION_DOWN, SESSION_GREETING, SESSION_READY };

/* Reason why there is no connection. It decides whether launches may continue by the file `limits`. */
enum session_admission {
    ADMITTED,    /* launches may continue: the agent is absent */
    RELEASING,   /* launches may never continue: the tenant's reservation is ending */
    TENANT_FULL, /* the tenant has its maximum of connections: launches wait until the agent accepts this process or is
                    absent */
    NO_SOCKET    /* this process cannot open a socket: launches wait until it can */
};

/* Last message on standard error about the connection. The same message is not written twice in a row. */
enum session_logged { LOGGED_NOTHING, LOGGED_AWAY, LOGGED_REFUSED, LOGGED_EXHAUSTED };

/* Order of the descriptors that arrive with WELCOME: hints page, pulse page. */
enum { SESSION_HINTS, SESSION_PULSE, SESSION_DESCRIPTORS };

/* Handle a frame of the type and size for which the handler was registered. `of`: as registered. `descriptors`:
 * descriptors that arrived with the frame, or -1 each; the session closes them. Return false if the frame violates the
 * protocol; the connection is then closed. Called in the hook thread, without a lock. */
typedef bool frame_handler(void *of, const void *frame, const int *descriptors);

struct frame_route {
    frame_handler *handle; /* NULL: frames of this type are ignored */
    void *of;
    uint32_t size; /* bytes of the whole frame */
};

enum { SESSION_FIRST_TYPE = SHP_WELCOME, SESSION_TYPES = SHP_REFUSED - SHP_WELCOME + 1 };

/* Callbacks about changes of the connection, called in the hook thread, without a lock. */
struct session_listener {
    void (*connected)(void *of);
    void (*disconnected)(void *of, bool was_ready); /* was_ready: WELCOME had arrived */
    void *of;
};

/* Request numbers (`seq`). 1 to SESSION_SEQ_MASK: requests of session_ask, whose thread waits for the answer.
 * SESSION_SEQ_HANDOVER: handover reports and reports of growth. SESSION_SEQ_PING: pings. No thread waits for the
 * answers of these two. */
enum { SESSION_SEQ_MASK = 0x0fffffff, SESSION_SEQ_HANDOVER = 0x10000000, SESSION_SEQ_PING = 0x20000000 };

struct session {
    struct gpus *gpus;
    const char *directory; /* directory of the socket, with a final slash */
    struct frame_route routes[SESSION_TYPES];
    struct session_listener listener;
    uint32_t hello_flags;     /* flags of the next HELLO */
    struct lock lock;         /* lock for sending, and for the questions */
    _Atomic uint32_t ready;   /* futex: 1 while frames may be sent */
    _Atomic bool greets;      /* HELLO was sent, and WELCOME has not arrived yet */
    uint32_t seq;             /* number of the last question; guarded by `lock` */
    enum session_state state; /* only the hook thread uses this and the members below, except `questions` */
    enum session_admission admission;
    enum session_logged logged;
    uint64_t next_attempt,
        backoff; /* in state SESSION_DOWN: time of the next attempt to connect; ns to pause after the next failure */
    uint64_t greeting_until; /* in state SESSION_GREETING: time at which to disconnect without WELCOME */
    uint64_t patient_until;  /* time until which launches wait for WELCOME, before they continue by the file `limits` */
    uint64_t heard, pinged, looked; /* times of: the last frame received; the last ping; the last check whether the
                                       program has closed descriptors of the hook */
    uint32_t grace_ms, gpu_count;   /* from WELCOME */
    uint16_t version;               /* version of the protocol, from WELCOME */
    const struct shp_hints *hints;  /* at the same address for the life of the process; all threads read it */
    struct shp_pulse *pulse;        /* NULL while none is mapped */
    struct question questions[SESSION_QUESTIONS];
};

/* Any thread may call the following functions. */

/* Wake the hook thread, which then runs the steps of all packages. */
void session_wake(void);
/* Send SHP_RESERVE with `flags`, or SHP_MEMINFO, for the GPU at `place`, and wait for the answer for at most `timeout`
 * ns. `value`: bytes to reserve, or bytes of idle credits. */
struct answer session_ask(struct session *session, int type, uint32_t flags, int place, uint64_t value,
                          uint64_t timeout);
/* Send SHP_RELEASE. Return false if there is no connection. The caller holds the lock of struct gpus. */
bool session_release(struct session *session, int place, uint64_t bytes, uint32_t flags);
/* Send SHP_RESERVE for bytes that the driver has already allocated. Return false if there is no connection, or the
 * socket is full because the agent does not read. The caller holds the lock of struct gpus. */
bool session_grown(struct session *session, int place, uint64_t bytes);

/* Only the hook thread may call the following functions, except where noted. */

/* Set the session up before the hook thread runs. Return false if this process has too many open files, or no memory.
 */
bool session_prepare(struct session *session, struct gpus *gpus, const char *directory);
/* Register the handler of a frame type, before the hook thread runs. */
void session_route(struct session *session, enum shp_type type, uint32_t size, frame_handler *handle, void *of);
/* Pass an answer to the thread that waits for it. Do nothing if no thread waits any more. */
void session_answer(struct session *session, uint32_t seq, struct answer answer);
/* Connect if an attempt is due. Disconnect from an agent that does not answer. */
void session_step(struct session *session, uint64_t now);
/* Return the time of the next call of session_step. */
uint64_t session_deadline(const struct session *session);
/* Wait for frames or session_wake until `deadline`, and handle the frames. */
void session_wait(struct session *session, uint64_t deadline);
/* Send a frame unchanged. Return false if there is no connection. The caller holds the session's lock. */
bool session_put(const void *frame, uint32_t size);
/* Fill in the frame's header and send the frame. Return false if there is no connection. */
bool session_send(struct session *session, void *frame, uint16_t type, uint32_t size);
/* If the agent has been silent for SHAREPOD_PING_MS, send a request. Without an answer, session_step disconnects. */
void session_ping(struct session *session, uint64_t now);
/* Return true if, by the hints page, another tenant wants one of this tenant's GPUs. The value may be out of date. */
bool session_contended(const struct session *session);

/* Close the descriptors that a child of fork inherited. */
void session_after_fork(void);

#endif
