/* NOCUDA. Time of a hand-off of the token from one tenant to the next: simulates tenants' processes for a running
 * agent.
 *
 * - handoff --seconds S --hold-us N GROUP:SOCKET...: tenants of one group share GPUs. Each holds the token for N us (0:
 *   for the whole quantum), returns it, and requests it again. While it holds the token, it writes the pulse page every
 *   0.5 ms, as the hook does. Measured is the time from sending DRAINED to receiving the next GRANT of the group.
 * - handoff --seconds S --hold-us N --echo: sends the same frames, every N us, to a process that sends them back. This
 *   is the cost of two sockets and two wake-ups alone.
 *
 * Prints one JSON object: {"count", "p50_us", "p99_us", "max_us"}.
 */
#include <errno.h>
#include <getopt.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "sharepod/protocol.h"

enum { TENANTS_MOST = 1024, SAMPLES_MOST = 1 << 20, BEAT_NS = 500000 };

struct tenant {
    int socket, group;
    uint32_t gpu_mask;
    uint64_t grant_id;
    struct shp_pulse *pulse;
};

struct group {
    struct tenant *holder;
    uint64_t until, drained; /* time at which the holder returns the token; time at which the last holder did */
};

static struct tenant tenants[TENANTS_MOST];
static struct group groups[TENANTS_MOST];
static unsigned tenant_count, group_count, sample_count;
static uint32_t samples[SAMPLES_MOST];     /* ns */
static uint16_t version = SHP_VERSION_MIN; /* version of the protocol with the agent */

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static void fail(const char *what) {
    fprintf(stderr, "handoff: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void sample(uint64_t duration) {
    if (sample_count < SAMPLES_MOST)
        samples[sample_count++] = duration > UINT32_MAX ? UINT32_MAX : (uint32_t)duration;
}

static void put(int socket, void *frame, uint16_t type, uint32_t size) {
    struct shp_header *header = frame;
    *header = (struct shp_header){.magic = SHP_MAGIC, .version = version, .type = type, .size = size};
    if (send(socket, frame, size, MSG_NOSIGNAL) != (ssize_t)size)
        fail("send");
}

/* Receive WELCOME, and return the pulse page that arrives with it. */
static struct shp_pulse *welcomed(int socket, struct shp_welcome *welcome) {
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(2 * sizeof(int))];
    } control;
    struct iovec content = {.iov_base = welcome, .iov_len = sizeof *welcome};
    struct msghdr message = {
        .msg_iov = &content, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != sizeof *welcome || welcome->header.type != SHP_WELCOME)
        fail("no welcome");
    const struct cmsghdr *passed = CMSG_FIRSTHDR(&message);
    int descriptors[2]; /* hints, pulse */
    if (passed == NULL || passed->cmsg_len != CMSG_LEN(sizeof descriptors))
        fail("a welcome without two descriptors");
    memcpy(descriptors, CMSG_DATA(passed), sizeof descriptors);
    void *page = mmap(NULL, sizeof(struct shp_pulse), PROT_READ | PROT_WRITE, MAP_SHARED, descriptors[1], 0);
    if (page == MAP_FAILED)
        fail("mmap");
    close(descriptors[0]);
    close(descriptors[1]);
    return page;
}

/* Write the pulse page: the tenant holds the token, and its work lasts until the end of its turn. */
static void beat(const struct group *group, uint64_t time) {
    struct shp_pulse *pulse = group->holder->pulse;
    __atomic_store_n(&pulse->grant_id, group->holder->grant_id, __ATOMIC_RELAXED);
    __atomic_store_n(&pulse->ends_at, group->until, __ATOMIC_RELAXED);
    __atomic_store_n(&pulse->beat_at, time, __ATOMIC_RELEASE);
}

static void enter(const char *argument) {
    char *path;
    struct tenant *tenant = &tenants[tenant_count];
    tenant->group = (int)strtol(argument, &path, 10);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (*path++ != ':' || tenant->group < 0 || tenant->group >= TENANTS_MOST || tenant_count + 1 >= TENANTS_MOST ||
        strlen(path) >= sizeof address.sun_path) {
        fprintf(stderr, "handoff: %s is not GROUP:SOCKET, or one too many\n", argument);
        exit(2);
    }
    strcpy(address.sun_path, path);
    tenant->socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (tenant->socket < 0 || connect(tenant->socket, (struct sockaddr *)&address, sizeof address) != 0)
        fail(path);
    struct shp_hello hello = {.version_min = SHP_VERSION_MIN, .version_max = SHP_VERSION_MAX};
    version = SHP_VERSION_MIN;
    put(tenant->socket, &hello, SHP_HELLO, sizeof hello);
    struct shp_welcome welcome;
    tenant->pulse = welcomed(tenant->socket, &welcome);
    version = welcome.header.version;
    tenant->gpu_mask = (1u << welcome.gpu_count) - 1;
    if ((unsigned)tenant->group >= group_count)
        group_count = (unsigned)tenant->group + 1;
    tenant_count++;
}

static void give_back(struct group *group) {
    struct tenant *tenant = group->holder;
    struct shp_drained drained = {.grant_id = tenant->grant_id, .flags = SHP_DRAINED_WANT};
    group->holder = NULL;
    group->drained = now();
    put(tenant->socket, &drained, SHP_DRAINED, sizeof drained);
}

static void take(struct tenant *tenant, uint64_t hold) {
    union {
        struct shp_header header;
        struct shp_grant grant;
        char bytes[SHP_FRAME_MAX];
    } frame;
    struct group *group = &groups[tenant->group];
    if (recv(tenant->socket, &frame, sizeof frame, 0) < (ssize_t)sizeof frame.header)
        fail("the agent has closed a connection");
    uint64_t time = now();
    if (frame.header.type == SHP_REVOKE && group->holder == tenant) {
        group->until = time;
    } else if (frame.header.type == SHP_GRANT && (frame.grant.flags & SHP_GRANT_RENEWS)) {
        if (group->holder == tenant && tenant->grant_id == frame.grant.grant_id && hold == 0)
            group->until = time + frame.grant.quantum_ns;
    } else if (frame.header.type == SHP_GRANT) {
        if (group->holder != NULL) { /* the agent took this process to be without processor time, and preempted it */
            give_back(group);
            group->drained = 0;
        }
        if (group->drained != 0)
            sample(time - group->drained);
        tenant->grant_id = frame.grant.grant_id;
        group->holder = tenant;
        group->until = time + (hold ? hold : frame.grant.quantum_ns);
        if (hold == 0 && frame.grant.quantum_ns == 0) /* no other tenant so far: REVOKE will arrive */
            group->until = UINT64_MAX;
    }
}

static void play(uint64_t end, uint64_t hold) {
    int poller = epoll_create1(EPOLL_CLOEXEC);
    for (unsigned i = 0; i < tenant_count; i++) {
        struct shp_want want = {.gpu_mask = tenants[i].gpu_mask};
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &tenants[i]};
        if (epoll_ctl(poller, EPOLL_CTL_ADD, tenants[i].socket, &event) != 0)
            fail("epoll_ctl");
        put(tenants[i].socket, &want, SHP_WANT, sizeof want);
    }
    for (uint64_t time = now(); time < end; time = now()) {
        uint64_t due = end;
        for (unsigned i = 0; i < group_count; i++) {
            if (groups[i].holder == NULL)
                continue;
            if (groups[i].until <= time) {
                give_back(&groups[i]);
                continue;
            }
            beat(&groups[i], time);
            if (groups[i].until < due)
                due = groups[i].until;
            if (time + BEAT_NS < due)
                due = time + BEAT_NS;
        }
        time = now();
        uint64_t left = due > time ? due - time : 0;
        struct timespec wait = {.tv_sec = (time_t)(left / 1000000000u), .tv_nsec = (long)(left % 1000000000u)};
        struct pollfd ready = {.fd = poller, .events = POLLIN};
        struct epoll_event events[64];
        if (ppoll(&ready, 1, &wait, NULL) <= 0)
            continue;
        int count = epoll_wait(poller, events, 64, 0);
        for (int i = 0; i < count; i++)
            take(events[i].data.ptr, hold);
    }
}

static void echo(uint64_t end, uint64_t pause) {
    int pair[2];
    struct shp_drained frame = {0};
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
        fail("socketpair");
    pid_t child = fork();
    if (child == 0) {
        close(pair[0]);
        for (struct pollfd ready = {.fd = pair[1], .events = POLLIN}; poll(&ready, 1, -1) > 0;)
            if (recv(pair[1], &frame, sizeof frame, 0) <= 0 || send(pair[1], &frame, sizeof frame, MSG_NOSIGNAL) < 0)
                break;
        _exit(0);
    }
    close(pair[1]);
    while (now() < end) {
        struct timespec wait = {.tv_sec = (time_t)(pause / 1000000000u), .tv_nsec = (long)(pause % 1000000000u)};
        struct pollfd ready = {.fd = pair[0], .events = POLLIN};
        clock_nanosleep(CLOCK_MONOTONIC, 0, &wait, NULL);
        uint64_t begin = now();
        put(pair[0], &frame, SHP_DRAINED, sizeof frame);
        if (poll(&ready, 1, 10000) != 1 || recv(pair[0], &frame, sizeof frame, 0) != sizeof frame)
            fail("no echo");
        sample(now() - begin);
    }
    close(pair[0]);
    waitpid(child, NULL, 0);
}

static int compare(const void *a, const void *b) {
    uint32_t one = *(const uint32_t *)a, other = *(const uint32_t *)b;
    return (one > other) - (one < other);
}

int main(int argc, char **argv) {
    static const struct option names[] = {
        {"seconds", 1, NULL, 's'}, {"hold-us", 1, NULL, 'h'}, {"echo", 0, NULL, 'e'}, {0}};
    double seconds = 5;
    uint64_t hold = 2000000;
    bool echoes = false;
    for (int option; (option = getopt_long(argc, argv, "", names, NULL)) != -1;)
        switch (option) {
        case 's': seconds = strtod(optarg, NULL); break;
        case 'h': hold = strtoull(optarg, NULL, 10) * 1000; break;
        case 'e': echoes = true; break;
        default: return 2;
        }
    if (echoes != (optind == argc)) {
        fputs("handoff: either --echo or GROUP:SOCKET arguments\n", stderr);
        return 2;
    }
    prctl(PR_SET_TIMERSLACK, 1);
    for (int i = optind; i < argc; i++)
        enter(argv[i]);
    uint64_t end = now() + (uint64_t)(seconds * 1e9);
    if (echoes)
        echo(end, hold);
    else
        play(end, hold);
    qsort(samples, sample_count, sizeof *samples, compare);
    if (sample_count == 0) {
        fputs("handoff: nothing was handed off\n", stderr);
        return 1;
    }
    printf("{\"count\": %u, \"p50_us\": %.1f, \"p99_us\": %.1f, \"max_us\": %.1f}\n", sample_count,
           samples[sample_count / 2] / 1e3, samples[(uint64_t)sample_count * 99 / 100] / 1e3,
           samples[sample_count - 1] / 1e3);
    return 0;
}
