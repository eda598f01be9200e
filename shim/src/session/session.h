/* The connection to the agent: one per process, made again whenever it is lost.
 *
 * Frames are received by the hook thread alone. Any thread may send, and may ask for memory and wait for the answer.
 */
#ifndef SHAREPOD_SESSION_H
#define SHAREPOD_SESSION_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/sys.h"
#include "sharepod/protocol.h"
#include "tenant/gpus.h"

struct answer {
    bool came; /* else there was no agent, or it went away meanwhile */
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

/* Without a connection launches go on by the file `limits`, if the agent is away; else they wait. */
enum session_admission {
    ADMITTED,
    RELEASING,   /* the tenant's reservation is ending: for good */
    TENANT_FULL, /* the tenant has too many processes connected: until the agent takes this one, or is gone */
    NO_SOCKET    /* this process can open no socket: until it can */
};

/* What was last said on standard error about the connection. */
enum session_said { SAID_NOTHING, SAID_AWAY, SAID_REFUSED, SAID_EXHAUSTED };

/* Acts on a frame of the type and size that it was registered for. `of`: as registered. `descriptor`: -1, or came along
 * and stays the caller's. False: the frame breaks the protocol and the connection ends. In the hook thread, with no
 * lock. */
typedef bool frame_handler(void *of, const void *frame, int descriptor);

struct frame_route {
    frame_handler *handle; /* NULL: frames of this type are ignored, as those of a later version are */
    void *of;
    uint32_t size; /* bytes of the whole frame */
};

enum { SESSION_FIRST_TYPE = SHP_WELCOME, SESSION_TYPES = SHP_REFUSED - SHP_WELCOME + 1 };

/* Is told of the connection; in the hook thread, with no lock. */
struct session_listener {
    void (*connected)(void *of);
    void (*disconnected)(void *of, bool was_ready); /* was_ready: WELCOME had come */
    void *of;
};

/* Request numbers: questions of threads; handovers and pings, whose answers nobody waits for. */
enum { SESSION_SEQ_MASK = 0x0fffffff, SESSION_SEQ_HANDOVER = 0x10000000, SESSION_SEQ_PING = 0x20000000 };

struct session {
    struct gpus *gpus;
    const char *directory; /* of the socket, with a final slash */
    struct frame_route routes[SESSION_TYPES];
    struct session_listener listener;
    uint32_t hello_flags;     /* of the next HELLO */
    struct lock lock;         /* for sending, and for the questions */
    _Atomic uint32_t ready;   /* futex: 1 while frames may be sent */
    enum session_state state; /* the hook thread's, as all below */
    uint64_t next_attempt, backoff, greeting_until, patient_until, heard, pinged, looked;
    enum session_admission admission;
    enum session_said said;
    uint32_t grace_ms, gpu_count;
    uint32_t seq;                  /* with the lock */
    const struct shp_hints *hints; /* NULL while none is mapped */
    struct question questions[SESSION_QUESTIONS];
};

/* From any thread. */

/* Makes the hook thread look at what has changed. */
void session_wake(void);
/* Sends SHP_RESERVE, with these flags, or SHP_MEMINFO for the GPU at `place` and waits for the answer, at most
 * `timeout` ns. */
struct answer session_ask(struct session *session, int type, uint32_t flags, int place, uint64_t value,
                          uint64_t timeout);
/* Sends SHP_RELEASE; false without a connection. With the lock of struct gpus. */
bool session_release(struct session *session, int place, uint64_t bytes, uint32_t flags);
/* Sends SHP_RESERVE of what the driver has taken already, if there is a connection. With the lock of struct gpus. */
void session_grown(struct session *session, int place, uint64_t bytes);

/* For the hook thread. */

/* Before the thread runs: opens what session_wake needs; false: too many open files. */
bool session_prepare(struct session *session, struct gpus *gpus, const char *directory);
/* Registers the handler of a type of frames. */
void session_route(struct session *session, enum shp_type type, uint32_t size, frame_handler *handle, void *of);
/* Hands an answer to the thread that waits for it, if there still is one. */
void session_answer(struct session *session, uint32_t seq, struct answer answer);
/* Connects if it is time to; drops an agent that does not answer. */
void session_step(struct session *session, uint64_t now);
/* When session_step has something to do next. */
uint64_t session_deadline(const struct session *session);
/* Waits for frames or session_wake until `deadline`, and handles what came. */
void session_wait(struct session *session, uint64_t deadline);
/* Sends a frame as it is, with the lock; false without a connection. */
bool session_put(const void *frame, uint32_t size);
/* Fills the header and sends; false without a connection. */
bool session_send(struct session *session, void *frame, uint16_t type, uint32_t size);
/* Asks for any answer, to see whether the agent lives. */
void session_ping(struct session *session, uint64_t now);
bool session_contended(const struct session *session);

/* In a child of fork: closes what it inherited. */
void session_after_fork(void);

#endif
