/* The session: connects, sends, requests, waits, and passes each frame to its handler (SE1).
 *
 * The socket is non-blocking. Only session_ask and session_wait wait for the agent.
 */
#include "session/session.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "base/descriptors.h"
#include "session/pages.h"

#define BACKOFF_LEAST (20 * SYS_MS) /* ns between attempts to connect: a restarted agent is back within a second */
#define BACKOFF_MOST (250 * SYS_MS)
#define GREETING_TIME (2 * SYS_SECOND)   /* ns from HELLO to WELCOME, at most: after that the hook disconnects */
#define GREETING_PATIENCE (200 * SYS_MS) /* ns from HELLO for which launches wait for WELCOME */
#ifndef SHAREPOD_PING_MS
#define SHAREPOD_PING_MS 5000 /* ms of silence, while a thread waits, until a ping, and from it to a disconnect */
#endif

#define LOOK SYS_SECOND     /* ns between two checks whether the program has closed descriptors of the hook */
#define BLIND (20 * SYS_MS) /* ns between two checks while no descriptor can wake the hook thread */

#ifndef SHAREPOD_BUILD
#define SHAREPOD_BUILD "0" /* placeholder for the hash of the hook that the build passes */
#endif

/* Plain variables, which a fork does not zero, so that a child can close these descriptors. A write to the pipe wakes
 * the hook thread. It is no eventfd, because descriptors.c cannot distinguish eventfds. */
static struct descriptor agent_socket = DESCRIPTOR_NONE, wake_end = DESCRIPTOR_NONE, woken_end = DESCRIPTOR_NONE;

void session_after_fork(void) {
    descriptor_close(&agent_socket);
    descriptor_close(&wake_end);
    descriptor_close(&woken_end);
}

/* Create the pipe to which session_wake writes. Return false if there are too many open files. */
static bool make_wake(void) {
    int ends[2];
    descriptor_close(&wake_end);
    descriptor_close(&woken_end);
    if (sys_call(SYS_pipe2, (long)ends, O_CLOEXEC | O_NONBLOCK, 0, 0, 0, 0) != 0)
        return false;
    bool woken = descriptor_keep(&woken_end, ends[0]), wake = descriptor_keep(&wake_end, ends[1]);
    return woken && wake;
}

bool session_prepare(struct session *session, struct gpus *gpus, const char *directory) {
    session_after_fork(); /* needed in a child of clone(2), where no fork handler runs */
    session->gpus = gpus;
    session->directory = directory;
    session->backoff = BACKOFF_LEAST;
    session->version = SHP_VERSION_MAX;
    if (session->hints == NULL)
        session->hints = hints_reserve();
    return session->hints != NULL && make_wake();
}

void session_route(struct session *session, enum shp_type type, uint32_t size, frame_handler *handle, void *of) {
    session->routes[type - SESSION_FIRST_TYPE] = (struct frame_route){.handle = handle, .of = of, .size = size};
}

void session_wake(void) {
    int end = descriptor_number(&wake_end);
    if (end >= 0)
        sys_call(SYS_write, end, (long)"", 1, 0, 0, 0);
}

static void fill(struct shp_header *header, uint16_t version, uint16_t type, uint32_t size, uint32_t seq) {
    *header = (struct shp_header){.magic = SHP_MAGIC, .version = version, .type = type, .size = size, .seq = seq};
}

bool session_put(const void *frame, uint32_t size) {
    int socket = descriptor_number(&agent_socket);
    return socket >= 0 &&
           sys_call(SYS_sendto, socket, (long)frame, size, MSG_NOSIGNAL | MSG_DONTWAIT, 0, 0) == (long)size;
}

/* Send a frame. Return false if there is no connection, or if the socket is full because the agent does not receive. In
 * the latter case a ping will end the connection. The caller holds the lock of the session. */
static bool send_locked(struct session *session, void *frame, uint16_t type, uint32_t size, uint32_t seq) {
    fill(frame, session->version, type, size, seq);
    return atomic_load(&session->ready) && session_put(frame, size);
}

bool session_send(struct session *session, void *frame, uint16_t type, uint32_t size) {
    lock(&session->lock);
    bool sent = send_locked(session, frame, type, size, 0);
    unlock(&session->lock);
    return sent;
}

bool session_release(struct session *session, int place, uint64_t bytes, uint32_t flags) {
    struct shp_release frame;
    int wire = session->gpus->gpus[place].wire;
    memset(&frame, 0, sizeof frame);
    frame.gpu = (uint32_t)wire;
    frame.flags = flags;
    frame.bytes = bytes;
    return wire >= 0 && session_send(session, &frame, SHP_RELEASE, sizeof frame);
}

bool session_grown(struct session *session, int place, uint64_t bytes) {
    struct shp_reserve frame;
    int wire = session->gpus->gpus[place].wire;
    memset(&frame, 0, sizeof frame);
    frame.gpu = (uint32_t)wire;
    frame.flags = SHP_RESERVE_GROWN;
    frame.bytes = bytes;
    lock(&session->lock);
    bool sent = wire >= 0 && send_locked(session, &frame, SHP_RESERVE, sizeof frame, SESSION_SEQ_HANDOVER);
    unlock(&session->lock);
    return sent;
}

/* Return a free question, or one whose thread no longer waits: it was cancelled, or a signal handler jumped out of the
 * wait. NULL: all are in use. The caller holds the lock. */
static struct question *free_question(struct session *session, int self) {
    for (int i = 0; i < SESSION_QUESTIONS; i++)
        if (atomic_load(&session->questions[i].state) == QUESTION_FREE)
            return &session->questions[i];
    for (int i = 0; i < SESSION_QUESTIONS; i++)
        if (session->questions[i].thread == self || !sys_thread_lives(session->questions[i].thread))
            return &session->questions[i];
    return NULL;
}

struct answer session_ask(struct session *session, int type, uint32_t flags, int place, uint64_t value,
                          uint64_t timeout) {
    union {
        struct shp_header header;
        struct shp_reserve reserve;
        struct shp_meminfo meminfo;
    } frame;
    struct answer nothing = {0};
    uint64_t deadline = sys_now() + timeout;
    int wire = session->gpus->gpus[place].wire;
    memset(&frame, 0, sizeof frame);
    uint32_t size = type == SHP_RESERVE ? sizeof frame.reserve : sizeof frame.meminfo;
    if (type == SHP_RESERVE) {
        frame.reserve.gpu = (uint32_t)wire;
        frame.reserve.flags = flags;
        frame.reserve.bytes = value;
    } else {
        frame.meminfo.gpu = (uint32_t)wire;
        frame.meminfo.idle = value;
    }
    lock(&session->lock);
    int self = sys_thread_id();
    struct question *question = wire < 0 ? NULL : free_question(session, self);
    uint32_t seq = 0;
    bool sent = false;
    if (question != NULL) {
        atomic_store(&question->state, QUESTION_FREE);
        question->thread = self;
        seq = (session->seq + 1) & SESSION_SEQ_MASK;
        question->seq = session->seq = seq = seq ? seq : 1;
        question->answer = nothing;
        sent = send_locked(session, &frame, (uint16_t)type, size, question->seq);
        if (sent)
            atomic_store(&question->state, QUESTION_WAITING);
    }
    unlock(&session->lock);
    if (!sent) {
        /* Wait until a question is free; for an allocation, wait also until there is a connection. The caller tries
         * again if it has time left. */
        uint64_t pause = 20 * SYS_MS;
        if (type == SHP_RESERVE)
            sys_wait(&session->ready, 0, timeout < pause ? timeout : pause);
        if (atomic_load(&session->ready))
            sys_sleep(SYS_MS);
        return nothing;
    }
    for (uint64_t now = sys_now(); atomic_load(&question->state) == QUESTION_WAITING && now < deadline; now = sys_now())
        sys_wait(&question->state, QUESTION_WAITING, deadline - now);
    lock(&session->lock);
    bool still = question->thread == self &&
                 question->seq == seq; /* false: a signal handler of this thread has used the question */
    struct answer answer = still && atomic_load(&question->state) == QUESTION_ANSWERED ? question->answer : nothing;
    if (still)
        atomic_store(&question->state, QUESTION_FREE);
    unlock(&session->lock);
    return answer;
}

/* Return the question with this request number; NULL: its thread no longer waits. The caller holds the lock. */
static struct question *waiting_question(struct session *session, uint32_t seq) {
    for (int i = 0; i < SESSION_QUESTIONS; i++)
        if (session->questions[i].seq == seq && atomic_load(&session->questions[i].state) == QUESTION_WAITING)
            return &session->questions[i];
    return NULL;
}

void session_answer(struct session *session, uint32_t seq, struct answer answer) {
    lock(&session->lock);
    struct question *question = waiting_question(session, seq);
    if (question != NULL) {
        question->answer = answer;
        atomic_store(&question->state, QUESTION_ANSWERED);
        sys_wake_all(&question->state);
    }
    unlock(&session->lock);
}

/* Return a pause between half of `pause` and `pause`. So processes that have lost the same agent do not all reconnect
 * at the same moment. */
static uint64_t spread(const struct session *session, uint64_t pause, uint64_t now) {
    uint64_t chance = (now ^ (uintptr_t)session) * 0x9e3779b97f4a7c15ull >> 32;
    return pause / 2 + chance % (pause / 2 + 1);
}

/* Disconnect: close the socket, end all waits for answers (SE2), plan the next attempt to connect, unmap the pages, and
 * notify the listener. */
static void drop(struct session *session) {
    lock(&session->gpus->lock);
    gpus_disconnect(session->gpus);
    unlock(&session->gpus->lock);
    lock(&session->lock);
    atomic_store(&session->ready, 0);
    atomic_store(&session->greets, false);
    descriptor_close(&agent_socket);
    for (int i = 0; i < SESSION_QUESTIONS; i++) {
        uint32_t waiting = QUESTION_WAITING;
        if (atomic_compare_exchange_strong(&session->questions[i].state, &waiting, QUESTION_LOST))
            sys_wake_all(&session->questions[i].state);
    }
    unlock(&session->lock);
    bool was_ready = session->state == SESSION_READY;
    session->state = SESSION_DOWN;
    session->patient_until = 0;
    uint64_t now = sys_now();
    session->next_attempt = now + spread(session, session->backoff, now);
    session->backoff = session->backoff * 2 < BACKOFF_MOST ? session->backoff * 2 : BACKOFF_MOST;
    hints_clear(session->hints);
    pulse_unmap(session->pulse);
    session->pulse = NULL;
    if (session->listener.disconnected != NULL)
        session->listener.disconnected(session->listener.of, was_ready);
}

/* Send HELLO. */
static void greet(struct session *session) {
    struct shp_hello frame;
    memset(&frame, 0, sizeof frame);
    fill(&frame.header, SHP_VERSION_MIN, SHP_HELLO, sizeof frame, 0);
    frame.version_min = SHP_VERSION_MIN;
    frame.version_max = SHP_VERSION_MAX;
    frame.flags = session->hello_flags;
    memcpy(frame.build, SHAREPOD_BUILD,
           sizeof SHAREPOD_BUILD < sizeof frame.build ? sizeof SHAREPOD_BUILD : sizeof frame.build - 1);
    session_put(&frame, sizeof frame); /* on failure nothing is done: the agent has sent its reason (REFUSED) before it
                                          closed the connection, and that is read next */
}

/* Write to standard error why there is no connection, unless that was the last message. */
static void log_once(struct session *session, enum session_logged what, const char *text) {
    if (session->logged != what)
        sys_say("no connection to the agent at ", session->directory, "agent.sock: ", text, NULL);
    session->logged = what;
}

/* The process cannot open a socket. Launches wait (SE4): otherwise a process without a free descriptor would run
 * without its share. */
static void exhausted(struct session *session) {
    if (session->admission == ADMITTED)
        session->admission = NO_SOCKET;
    log_once(session, LOGGED_EXHAUSTED, "too many open files here; launches wait until there is room for a socket");
    drop(session);
}

/* The agent is absent: launches continue by the file `limits`, unless the reservation is ending (SE4). */
static void away(struct session *session) {
    if (session->admission != RELEASING)
        session->admission = ADMITTED;
    log_once(session, LOGGED_AWAY, "going on by the file `limits`, trying again");
    drop(session);
}

/* Connect and send HELLO. */
static void connect_agent(struct session *session, uint64_t now) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = strlen(session->directory);
    long socket = sys_call(SYS_socket, AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, 0, 0, 0);
    if (socket == -EMFILE || socket == -ENFILE || socket == -ENOBUFS || socket == -ENOMEM) {
        exhausted(session);
        return;
    }
    if (socket < 0 || !descriptor_keep(&agent_socket, (int)socket) ||
        length + sizeof "agent.sock" > sizeof address.sun_path) {
        away(session);
        return;
    }
    memcpy(address.sun_path, session->directory, length);
    memcpy(address.sun_path + length, "agent.sock", sizeof "agent.sock");
    if (sys_call(SYS_connect, descriptor_number(&agent_socket), (long)&address, sizeof address, 0, 0, 0) != 0) {
        away(session);
        return;
    }
    session->state = SESSION_GREETING;
    atomic_store(&session->greets, true);
    session->greeting_until = now + GREETING_TIME;
    session->patient_until = now + GREETING_PATIENCE;
    greet(session);
}

void session_step(struct session *session, uint64_t now) {
    if (session->state == SESSION_DOWN && now >= session->next_attempt)
        connect_agent(session, now);
    else if (session->state == SESSION_GREETING && now >= session->greeting_until)
        drop(session);
    else if (session->state == SESSION_READY && session->pinged > session->heard &&
             now >= session->pinged + SHAREPOD_PING_MS * SYS_MS) {
        sys_say("the agent does not answer: going on by the file `limits`", NULL);
        drop(session);
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
    send_locked(session, &frame, SHP_MEMINFO, sizeof frame, SESSION_SEQ_PING);
    unlock(&session->lock);
    session->pinged = now;
}

bool session_contended(const struct session *session) {
    return atomic_load_explicit((const _Atomic uint32_t *)&session->hints->contended, memory_order_relaxed);
}

/* Read one packet with its descriptors (-1: none). Return its size in bytes, or a negative errno. */
static long read_packet(int socket, void *frame, size_t room, int descriptors[SESSION_DESCRIPTORS]) {
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(SESSION_DESCRIPTORS * sizeof(int))];
    } control;
    struct iovec part = {.iov_base = frame, .iov_len = room};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    long size = sys_call(SYS_recvmsg, socket, (long)&message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC, 0, 0, 0);
    struct cmsghdr *first = size > 0 ? CMSG_FIRSTHDR(&message) : NULL;
    for (int i = 0; i < SESSION_DESCRIPTORS; i++)
        descriptors[i] = -1;
    if (first != NULL && first->cmsg_level == SOL_SOCKET && first->cmsg_type == SCM_RIGHTS)
        memcpy(descriptors, CMSG_DATA(first), first->cmsg_len - CMSG_LEN(0));
    return size;
}

/* Check a frame and pass it to its handler. Return false if the frame violates the protocol. */
static bool handle(struct session *session, const struct shp_header *header, size_t size, const int *descriptors) {
    if (size < sizeof *header || header->magic != SHP_MAGIC || header->size != size)
        return false;
    if (session->state == SESSION_GREETING && header->type != SHP_WELCOME && header->type != SHP_REFUSED)
        return false;
    unsigned index = header->type - (unsigned)SESSION_FIRST_TYPE;
    if (index >= SESSION_TYPES || session->routes[index].handle == NULL)
        return true; /* a type of a later version, which is ignored */
    const struct frame_route *route = &session->routes[index];
    return size == route->size && route->handle(route->of, header, descriptors);
}

/* Handle all frames that have arrived. */
static void receive(struct session *session) {
    union {
        struct shp_header header;
        char bytes[SHP_FRAME_MAX];
    } frame;
    for (;;) {
        int descriptors[SESSION_DESCRIPTORS] = {-1, -1}, socket = descriptor_number(&agent_socket);
        long size = socket < 0 ? 0 : read_packet(socket, &frame, sizeof frame, descriptors);
        if (size == -ECONNRESET) /* the agent's last frames can still be read after this error */
            size = read_packet(socket, &frame, sizeof frame, descriptors);
        if (size == -EAGAIN || size == -EINTR)
            return;
        if (size <= 0) { /* the agent closed the connection, or the program closed the hook's descriptor */
            drop(session);
            return;
        }
        session->heard = sys_now();
        bool understood = handle(session, &frame.header, (size_t)size, descriptors);
        for (int i = 0; i < SESSION_DESCRIPTORS; i++)
            if (descriptors[i] >= 0)
                sys_close(descriptors[i]);
        if (!understood) {
            drop(session);
            return;
        }
    }
}

/* Replace descriptors that the program has closed or reused. */
static void look_after_descriptors(struct session *session, uint64_t now) {
    session->looked = now;
    if (descriptor_number(&wake_end) < 0 || descriptor_number(&woken_end) < 0)
        make_wake();
    if (session->state != SESSION_DOWN && descriptor_number(&agent_socket) < 0)
        drop(session);
}

void session_wait(struct session *session, uint64_t deadline) {
    int woken = atomic_load(&woken_end.number), socket = atomic_load(&agent_socket.number);
    struct pollfd files[2] = {{.fd = woken, .events = POLLIN}, {.fd = socket, .events = POLLIN}};
    uint64_t now = sys_now(), look = now + (woken < 0 ? BLIND : LOOK);
    if (deadline > look)
        deadline = look;
    struct timespec time = sys_timespec(deadline > now ? deadline - now : 0);
    long ready = sys_call(SYS_ppoll, (long)files, 2, (long)&time, 0, 8, 0);
    if (ready < 0 && ready != -EINTR) { /* a limit or a sandbox forbids ppoll: poll by sleeping */
        sys_sleep(BLIND);
        files[0].revents = files[1].revents = POLLIN;
    }
    if (files[0].revents != 0) {
        char ignored[512];
        int number = descriptor_number(&woken_end);
        if (number >= 0)
            sys_call(SYS_read, number, (long)ignored, sizeof ignored, 0, 0, 0);
        else
            make_wake();
    }
    if (files[1].revents != 0 && session->state != SESSION_DOWN)
        receive(session);
    now = sys_now();
    if (now >= session->looked + LOOK || woken < 0)
        look_after_descriptors(session, now);
}
