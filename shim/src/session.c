/* See session.h. Here: connecting, sending, asking, waiting. What frames mean stands in frames.c. */
#include "session.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "frames.h"
#include "process.h"

#define BACKOFF_LEAST (20 * SYS_MS)
#define BACKOFF_MOST (1000 * SYS_MS)
#define GREETING_TIME (2 * SYS_SECOND)
#define GREETING_PATIENCE (200 * SYS_MS) /* after HELLO, before the duty cycle without a daemon goes on */
#ifndef SHAREPOD_PING_MS
#define SHAREPOD_PING_MS 5000 /* a daemon that is silent for this long while we wait is asked whether it lives */
#endif

#ifndef SHAREPOD_BUILD
#define SHAREPOD_BUILD "unknown"
#endif

/* Not in wiped memory: a child of fork closes them. */
static int open_socket = -1, open_wake = -1;

void session_after_fork(void) {
    if (open_socket >= 0)
        sys_close(open_socket);
    if (open_wake >= 0)
        sys_close(open_wake);
    open_socket = open_wake = -1;
}

bool session_prepare(struct session *session) {
    enum { EFD_FLAGS = O_CLOEXEC | O_NONBLOCK };
    session->socket = -1;
    session->backoff = BACKOFF_LEAST;
    open_wake = (int)sys_call(SYS_eventfd2, 0, EFD_FLAGS, 0, 0, 0, 0);
    return open_wake >= 0;
}

void session_wake(struct session *session) {
    uint64_t one = 1;
    (void)session;
    sys_call(SYS_write, open_wake, (long)&one, sizeof one, 0, 0, 0);
}

static void fill(struct session *session, struct shp_header *header, uint16_t type, uint32_t size, uint32_t seq) {
    (void)session;
    *header =
        (struct shp_header){.magic = SHP_MAGIC, .version = SHP_VERSION_MAX, .type = type, .size = size, .seq = seq};
}

static bool put(int socket, const void *frame, uint32_t size) {
    return sys_call(SYS_sendto, socket, (long)frame, size, MSG_NOSIGNAL | MSG_DONTWAIT, 0, 0) == (long)size;
}

/* Without the lock of the session. A daemon that reads nothing any more is dropped by the ping. */
static bool send_locked(struct session *session, void *frame, uint16_t type, uint32_t size, uint32_t seq,
                        bool handover) {
    fill(session, frame, type, size, seq);
    return (handover || atomic_load(&session->ready)) && session->socket >= 0 && put(session->socket, frame, size);
}

bool session_send(struct session *session, void *frame, uint16_t type, uint32_t size) {
    lock(&session->lock);
    bool sent = send_locked(session, frame, type, size, 0, false);
    unlock(&session->lock);
    return sent;
}

bool session_release(struct session *session, int place, uint64_t bytes, uint32_t flags) {
    struct shp_release frame;
    int wire = the_process->gpus.gpus[place].wire;
    memset(&frame, 0, sizeof frame);
    frame.gpu = (uint32_t)wire;
    frame.flags = flags;
    frame.bytes = bytes;
    return wire >= 0 && session_send(session, &frame, SHP_RELEASE, sizeof frame);
}

static struct question *free_question(struct session *session) {
    for (int i = 0; i < SESSION_QUESTIONS; i++)
        if (atomic_load(&session->questions[i].state) == 0)
            return &session->questions[i];
    return NULL;
}

struct answer session_ask(struct session *session, int type, int place, uint64_t value, uint64_t timeout) {
    union {
        struct shp_header header;
        struct shp_reserve reserve;
        struct shp_meminfo meminfo;
    } frame;
    struct answer nothing = {0};
    uint64_t deadline = sys_now() + timeout;
    int wire = the_process->gpus.gpus[place].wire;
    memset(&frame, 0, sizeof frame);
    uint32_t size = type == SHP_RESERVE ? sizeof frame.reserve : sizeof frame.meminfo;
    if (type == SHP_RESERVE) {
        frame.reserve.gpu = (uint32_t)wire;
        frame.reserve.bytes = value;
    } else {
        frame.meminfo.gpu = (uint32_t)wire;
        frame.meminfo.idle = value;
    }
    lock(&session->lock);
    struct question *question = wire < 0 ? NULL : free_question(session);
    bool sent = false;
    if (question != NULL) {
        question->seq = session->seq = (session->seq + 1) & FRAMES_SEQ_MASK ? (session->seq + 1) & FRAMES_SEQ_MASK : 1;
        question->answer = nothing;
        sent = send_locked(session, &frame, (uint16_t)type, size, question->seq, false);
        if (sent)
            atomic_store(&question->state, 1);
    }
    unlock(&session->lock);
    if (!sent) {
        /* Until there is a connection, or a question is free again. The caller asks again if it has the time. */
        uint64_t pause = type == SHP_RESERVE ? 20 * SYS_MS : 0;
        if (pause > 0)
            sys_wait(&session->ready, 0, timeout < pause ? timeout : pause);
        if (pause > 0 && atomic_load(&session->ready))
            sys_sleep(SYS_MS);
        return nothing;
    }
    for (uint64_t now = sys_now(); atomic_load(&question->state) == 1 && now < deadline; now = sys_now())
        sys_wait(&question->state, 1, deadline - now);
    lock(&session->lock);
    struct answer answer = atomic_load(&question->state) == 2 ? question->answer : nothing;
    atomic_store(&question->state, 0);
    unlock(&session->lock);
    return answer;
}

void session_drop(struct session *session) {
    struct process *process = the_process;
    lock(&process->gpus.lock);
    gpus_disconnect(&process->gpus);
    unlock(&process->gpus.lock);
    lock(&session->lock);
    atomic_store(&session->ready, 0);
    if (session->socket >= 0)
        sys_close(session->socket);
    session->socket = open_socket = -1;
    for (int i = 0; i < SESSION_QUESTIONS; i++) {
        uint32_t waiting = 1;
        if (atomic_compare_exchange_strong(&session->questions[i].state, &waiting, 3))
            sys_wake_all(&session->questions[i].state);
    }
    unlock(&session->lock);
    bool was_ready = session->state == SESSION_READY;
    session->state = SESSION_DOWN;
    session->patient_until = 0;
    session->next_attempt = sys_now() + session->backoff;
    session->backoff = session->backoff * 2 < BACKOFF_MOST ? session->backoff * 2 : BACKOFF_MOST;
    frames_unmap_hints(session);
    token_disconnected(&process->token, was_ready);
}

static void greet(struct session *session) {
    struct shp_hello frame;
    memset(&frame, 0, sizeof frame);
    fill(session, &frame.header, SHP_HELLO, sizeof frame, 0);
    frame.header.version = SHP_VERSION_MIN;
    frame.version_min = SHP_VERSION_MIN;
    frame.version_max = SHP_VERSION_MAX;
    frame.flags = the_process->gate.fenced ? SHP_HELLO_NO_MEMBARRIER : 0;
    memcpy(frame.build, SHAREPOD_BUILD,
           sizeof SHAREPOD_BUILD < sizeof frame.build ? sizeof SHAREPOD_BUILD : sizeof frame.build - 1);
    if (!put(session->socket, &frame, sizeof frame))
        session_drop(session);
}

static void connect_daemon(struct session *session, uint64_t now) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = strlen(the_process->directory);
    long socket = sys_call(SYS_socket, AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, 0, 0, 0);
    if (socket >= 0 && length + sizeof "agent.sock" <= sizeof address.sun_path) {
        memcpy(address.sun_path, the_process->directory, length);
        memcpy(address.sun_path + length, "agent.sock", sizeof "agent.sock");
        session->socket = open_socket = (int)socket;
        if (sys_call(SYS_connect, socket, (long)&address, sizeof address, 0, 0, 0) == 0) {
            session->state = SESSION_GREETING;
            session->greeting_until = now + GREETING_TIME;
            session->patient_until = now + GREETING_PATIENCE;
            greet(session);
            return;
        }
    } else if (socket >= 0) {
        sys_close((int)socket);
    }
    if (!session->told)
        sys_say("no agent at ", the_process->directory, "agent.sock: going on by the file `limits`, trying again",
                NULL);
    session->told = true;
    session_drop(session);
}

void session_step(struct session *session, uint64_t now) {
    if (session->state == SESSION_DOWN && now >= session->next_attempt)
        connect_daemon(session, now);
    else if (session->state == SESSION_GREETING && now >= session->greeting_until)
        session_drop(session);
    else if (session->state == SESSION_READY && session->pinged > session->heard &&
             now >= session->pinged + SHAREPOD_PING_MS * SYS_MS) {
        sys_say("the agent does not answer: going on by the file `limits`", NULL);
        session_drop(session);
    }
}

uint64_t session_deadline(const struct session *session) {
    switch (session->state) {
    case SESSION_DOWN: return session->next_attempt;
    case SESSION_GREETING: return session->greeting_until;
    default: return session->pinged > session->heard ? session->pinged + SHAREPOD_PING_MS * SYS_MS : SYS_NEVER;
    }
}

void session_ping(struct session *session, uint64_t now) {
    struct shp_meminfo frame;
    uint64_t last = session->heard > session->pinged ? session->heard : session->pinged;
    if (session->state != SESSION_READY || session->pinged > session->heard || now < last + SHAREPOD_PING_MS * SYS_MS)
        return;
    memset(&frame, 0, sizeof frame);
    lock(&session->lock);
    send_locked(session, &frame, SHP_MEMINFO, sizeof frame, FRAMES_SEQ_PING, false);
    unlock(&session->lock);
    session->pinged = now;
}

bool session_contended(const struct session *session) {
    return session->hints != NULL &&
           atomic_load_explicit((const _Atomic uint32_t *)&session->hints->contended, memory_order_relaxed);
}

static void receive(struct session *session) {
    union {
        struct shp_header header;
        char bytes[SHP_FRAME_MAX];
    } frame;
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    while (session->socket >= 0) {
        struct iovec part = {.iov_base = &frame, .iov_len = sizeof frame};
        struct msghdr message = {
            .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
        long size = sys_call(SYS_recvmsg, session->socket, (long)&message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC, 0, 0, 0);
        if (size == -EAGAIN || size == -EINTR)
            return;
        if (size <= 0) { /* ended, or the program closed our descriptor */
            session_drop(session);
            return;
        }
        int descriptor = -1;
        struct cmsghdr *first = CMSG_FIRSTHDR(&message);
        if (first != NULL && first->cmsg_level == SOL_SOCKET && first->cmsg_type == SCM_RIGHTS)
            memcpy(&descriptor, CMSG_DATA(first), sizeof descriptor);
        session->heard = sys_now();
        if (!frames_handle(session, &frame.header, (size_t)size, descriptor))
            session_drop(session);
        if (descriptor >= 0)
            sys_close(descriptor);
    }
}

void session_wait(struct session *session, uint64_t deadline) {
    struct pollfd files[2] = {{.fd = open_wake, .events = POLLIN}, {.fd = session->socket, .events = POLLIN}};
    uint64_t now = sys_now(), ignored;
    struct timespec time = sys_timespec(deadline > now ? deadline - now : 0);
    sys_call(SYS_ppoll, (long)files, 2, deadline == SYS_NEVER ? 0 : (long)&time, 0, 8, 0);
    if (files[0].revents != 0)
        sys_call(SYS_read, open_wake, (long)&ignored, sizeof ignored, 0, 0, 0);
    if (files[1].revents != 0)
        receive(session);
}
