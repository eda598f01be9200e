/* Descriptors of exported memory: a descriptor is one end of a socket pair, whose other end the double keeps.
 *
 * The description of the memory stays in the socket's queue, where it is read without being removed (MSG_PEEK). When
 * the last copy of the descriptor is closed, in any process, the kept end reports a hang-up. An importer creates
 * another socket pair, a lease: it sends one end over the descriptor, and keeps the other. So the importer keeps the
 * memory although it closes the descriptor.
 */
#include "memory/exported.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "device/fake.h"

/* Memory that was exported by one descriptor. */
struct export {
    unsigned ends; /* number of open ends: the descriptor and the leases */
    void (*over)(void *);
    void *of;
};

/* An end that the double keeps: of the descriptor or of a lease. */
struct kept {
    int end;
    struct export *export;
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int watch = -1;

static bool keep(int end, struct export *export) {
    struct kept *kept = malloc(sizeof *kept);
    *kept = (struct kept){end, export};
    struct epoll_event readable = {.events = EPOLLIN, .data.ptr = kept};
    if (epoll_ctl(watch, EPOLL_CTL_ADD, end, &readable) == 0) {
        export->ends++;
        return true;
    }
    free(kept);
    return false;
}

/* Send a descriptor together with one byte, or receive one. Return the received descriptor; -1: none was received. */
static int pass(int socket, int descriptor, bool sends) {
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    char byte = 0;
    struct iovec part = {&byte, 1};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    if (sends) {
        control.header = (struct cmsghdr){CMSG_LEN(sizeof descriptor), SOL_SOCKET, SCM_RIGHTS};
        memcpy(CMSG_DATA(&control.header), &descriptor, sizeof descriptor);
        return sendmsg(socket, &message, MSG_NOSIGNAL) == 1 ? 0 : -1;
    }
    if (recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) != 1 || CMSG_FIRSTHDR(&message) == NULL)
        return -1;
    memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof descriptor);
    return descriptor;
}

void fake_exports_settle(void) {
    struct epoll_event event;
    while (watch >= 0 && epoll_wait(watch, &event, 1, 0) == 1) {
        struct kept *kept = event.data.ptr;
        struct export *export = kept->export;
        for (int lease; (lease = pass(kept->end, -1, false)) >= 0;)
            if (!keep(lease, export))
                close(lease);
        if (!(event.events & EPOLLHUP))
            continue;
        close(kept->end);
        free(kept);
        if (--export->ends == 0) {
            export->over(export->of);
            free(export);
        }
    }
}

int fake_export_lease(int descriptor) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
        return -1;
    if (pass(descriptor, ends[0], true) != 0) {
        close(ends[1]);
        ends[1] = -1;
    }
    close(ends[0]);
    return ends[1];
}

static void *wait_for_ends(void *nothing) {
    struct pollfd ready = {.fd = watch, .events = POLLIN};
    while (poll(&ready, 1, -1) >= 0 || errno == EINTR) {
        pthread_mutex_lock(&fake_lock);
        fake_exports_settle();
        pthread_mutex_unlock(&fake_lock);
    }
    return nothing;
}

static void begin(void) {
    pthread_t thread;
    watch = epoll_create1(EPOLL_CLOEXEC);
    if (pthread_create(&thread, NULL, wait_for_ends, NULL) == 0)
        pthread_detach(thread);
}

int fake_export_open(const void *content, size_t bytes, void (*over)(void *), void *of) {
    int ends[2];
    pthread_once(&once, begin);
    if (watch < 0 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
        return -1;
    struct export *export = malloc(sizeof *export);
    *export = (struct export){0, over, of};
    if (send(ends[0], content, bytes, MSG_NOSIGNAL) == (ssize_t)bytes && keep(ends[0], export))
        return ends[1];
    free(export);
    close(ends[0]);
    close(ends[1]);
    return -1;
}

bool fake_export_read(int descriptor, void *content, size_t bytes) {
    return recv(descriptor, content, bytes, MSG_PEEK | MSG_DONTWAIT) == (ssize_t)bytes;
}
