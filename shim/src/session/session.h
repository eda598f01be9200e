/* The session: the process's one connection to the agent, opened again whenever it is lost.
 *
 * Guarantees:
 * - SE1 one receiver: only the hook thread receives frames and calls handlers; any thread may send.
 * - SE2 no unbounded wait for an answer: session_ask ends at its timeout or when the connection is lost.
 * - SE3 handover first: on a new connection the hook first reports the process's memory, and marks the report's end at
 *   once. Other requests follow.
 * - SE4 without a connection, launches continue by the file `limits` only if the agent is absent, see enum
 *   session_admission.
 *
 * The session parses only HELLO and its own requests. Each package registers handlers for its frames: frames.c,
 * token.c, credits.c.
 */
#ifndef SHAREPOD_SESSION_H
#define SHAREPOD_SESSION_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/sys.h"
#include "sharepod/protocol.h"
#include "tenant/gpus.h"

/* The agent's answer to a question of session_ask. */
struct answer {
    bool came;            /* false: no agent, or it went away or did not answer in time; the rest is 0 */
    uint32_t status;      /* of RESERVED: enum shp_reserve_status */
    uint64_t limit, used; /* of MEMORY: bytes, of all processes of the tenant */
};

/* Threads that may wait for an answer at once; one more asks again when a question is free. */
enum { SESSION_QUESTIONS = 64 };

enum question_state { QUESTION_FREE, QUESTION_WAITING, QUESTION_ANSWERED, QUESTION_LOST };

struct question {
    _Atomic uint32_t state; /* futex: enum question_state; LOST: the connection was lost */
    uint32_t seq;
    int thread; /* that waits for the answer */
    struct answer answer;
};

enum session_state { SESSION_DOWN, SESSION_GREETING, SESSION_READY };

/* Whether launches may continue by the file `limits` while there is no connection. */
enum session_admission {
    ADMITTED,    /* they may: the agent is away */
    RELEASING,   /* never again: the tenant's reservation is ending */
    TENANT_FULL, /* not until the agent accepts this process, or is absent: the tenant has its maximum of connections */
    NO_SOCKET    /* not until this process can open a socket */
};

/* The last message on standard error about the connection; the same is not written twice in a row. */
enum session_said { SAID_NOTHING, SAID_AWAY, SAID_REFUSED, SAID_EXHAUSTED };

/* Descriptors that may come with a frame: WELCOME brings the hints page, and the pulse page. */
enum { SESSION_HINTS, SESSION_PULSE, SESSION_DESCRIPTORS };

/* Acts on a frame of the type and size that it was registered for. `of`: as registered. `descriptors`: each -1, or came
 * along and stays the caller's. False: the frame breaks the protocol and the connection ends. In the hook thread, with
 * no lock. */
typedef bool frame_handler(void *of, const void *frame, const int *descriptors);

struct frame_route {
    frame_handler *handle; /* NULL: frames of this type are ignored, as are those of a later version */
    void *of;
    uint32_t size; /* bytes of the whole frame */
};

enum { SESSION_FIRST_TYPE = SHP_WELCOME, SESSION_TYPES = SHP_REFUSED - SHP_WELCOME + 1 };

/* Callbacks on changes of the connection; in the hook thread, without a lock. */
struct session_listener {
    void (*connected)(void *of);
    void (*disconnected)(void *of, bool was_ready); /* was_ready: WELCOME had arrived */
    void *of;
};

/* Request numbers: threads' requests with an answer; handovers and pings, whose answers no thread awaits. */
enum { SESSION_SEQ_MASK = 0x0fffffff, SESSION_SEQ_HANDOVER = 0x10000000, SESSION_SEQ_PING = 0x20000000 };

struct session {
    struct gpus *gpus;
    const char *directory; /* of the socket, with a final slash */
    struct frame_route routes[SESSION_TYPES];
    struct session_listener listener;
    uint32_t hello_flags;     /* of the next HELLO */
    struct lock lock;         /* for sending, and for the questions */
    _Atomic uint32_t ready;   /* futex: 1 while frames may be sent */
    _Atomic bool greets;      /* HELLO was sent, and WELCOME has not arrived yet */
    uint32_t seq;             /* of the last question; with the lock */
    enum session_state state; /* the hook thread's, as all below but the questions */
    enum session_admission admission;
    enum session_said said;
    uint64_t next_attempt, backoff; /* SESSION_DOWN: when to connect; ns, the pause after the next failure */
    uint64_t greeting_until;        /* SESSION_GREETING: when an agent that has not sent WELCOME is dropped */
    uint64_t patient_until;         /* until when the duty cycle without an agent waits for WELCOME */
    uint64_t heard, pinged, looked; /* times of the last frame, the last ping, the last check of descriptors */
    uint32_t grace_ms, gpu_count;   /* of WELCOME */
    uint16_t version;               /* of the protocol, from WELCOME */
    const struct shp_hints *hints;  /* at the same address for the life of the process; read by all threads */
    struct shp_pulse *pulse;        /* NULL while none is mapped */
    struct question questions[SESSION_QUESTIONS];
};

/* From any thread. */

/* Wake the hook thread to check for changes. */
void session_wake(void);
/* Send SHP_RESERVE, with these flags, or SHP_MEMINFO for the GPU at `place`. Wait for the answer, at most `timeout` ns.
 * `value`: bytes to reserve, or bytes that are idle. */
struct answer session_ask(struct session *session, int type, uint32_t flags, int place, uint64_t value,
                          uint64_t timeout);
/* Send SHP_RELEASE. False: no connection. With the lock of struct gpus. */
bool session_release(struct session *session, int place, uint64_t bytes, uint32_t flags);
/* Send SHP_RESERVE of bytes that the driver has taken already. False: no connection, or the agent reads nothing. With
 * the lock of struct gpus. */
bool session_grown(struct session *session, int place, uint64_t bytes);

/* For the hook thread. */

/* Prepare before the thread runs. False: too many files are open in this process, or it has no memory. */
bool session_prepare(struct session *session, struct gpus *gpus, const char *directory);
/* Register the handler of a type of frames, before the thread runs. */
void session_route(struct session *session, enum shp_type type, uint32_t size, frame_handler *handle, void *of);
/* Hand an answer to the thread that waits for it, if there still is one. */
void session_answer(struct session *session, uint32_t seq, struct answer answer);
/* Connect if it is time to; drop an agent that does not answer. */
void session_step(struct session *session, uint64_t now);
/* Return when session_step has something to do next. */
uint64_t session_deadline(const struct session *session);
/* Wait for frames or session_wake until `deadline`, and handle them. */
void session_wait(struct session *session, uint64_t deadline);
/* Send a frame as it is. With the lock of the session. False: no connection. */
bool session_put(const void *frame, uint32_t size);
/* Fill the header and send the frame. False: no connection. */
bool session_send(struct session *session, void *frame, uint16_t type, uint32_t size);
/* Ask for any answer, to see whether the agent lives. */
void session_ping(struct session *session, uint64_t now);
/* Return whether another tenant wants one of these GPUs, by the hints page: a hint, not a promise. */
bool session_contended(const struct session *session);

/* Close the descriptors that a child of fork inherited. */
void session_after_fork(void);

#endif
