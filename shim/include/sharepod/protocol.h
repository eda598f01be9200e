/* The wire format between the hook (client, inside a tenant's process) and the agent (on the node).
 *
 * One SOCK_SEQPACKET connection per process, on the tenant's own socket. The socket identifies the tenant; a client
 * sends no identity.
 *
 * Guarantees of both sides:
 * - A frame is one packet of the fixed size of its type, in the host's byte order, and begins with shp_header.
 * - A zero-length packet, a wrong size or a value out of range closes the connection. So does a type unknown to the
 *   agent, while a client ignores the types of a later version.
 * - Times are durations in nanoseconds, never points in time: a container may have a time namespace of its own. Points
 *   in time in the pulse page are of the client's clock, and only their differences have meaning.
 * - Shares are integer thousandths of one GPU's time ("milli"); sizes are bytes.
 * - The agent supports every version since 1. A client offers [version_min, version_max] in HELLO, the agent chooses
 *   one in WELCOME. Fields are only added instead of `reserved`, or in a new type, with a new version.
 *
 * The header is compiled into the hook, and by cffi (API mode) into the agent, whose build fails for a struct that
 * differs. It contains only syntax that both parsers support: enums, structs of fixed-width integers, and #defines of
 * plain numbers.
 */
#ifndef SHAREPOD_PROTOCOL_H
#define SHAREPOD_PROTOCOL_H

#include <stdint.h>

#define SHP_MAGIC 0x50485331 /* "1SHP" read as little-endian bytes */
#define SHP_VERSION_MIN 1
#define SHP_VERSION_MAX 3    /* 2: the pulse page, and `barred` in the hints page; 3: tenants that co-run */
#define SHP_MAX_GPUS 16      /* of one tenant on one node */
#define SHP_UUID_BYTES 16    /* the raw bytes of GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx */
#define SHP_TEXT_BYTES 160   /* zero-terminated UTF-8 */
#define SHP_FRAME_MAX 1024   /* bytes: no frame is larger */
#define SHP_HINTS_BYTES 4096 /* one page */
#define SHP_PULSE_BYTES 4096 /* one page */

enum shp_type {
    /* client to agent */
    SHP_HELLO = 1,    /* first frame */
    SHP_WANT = 2,     /* a thread waits at the gate: requests the token; an overdue holder: its next turn */
    SHP_DRAINED = 3,  /* gate closed and all GPU work of the grant finished: returns the token */
    SHP_RESERVE = 4,  /* requests bytes of device memory; answered by RESERVED with the same seq */
    SHP_RELEASE = 5,  /* returns credited bytes */
    SHP_MEMINFO = 6,  /* requests the tenant's view of memory; answered by MEMORY with the same seq */
    SHP_DRAINING = 7, /* gate closed, the last GPU work of the grant is ending: DRAINED follows */

    /* agent to client */
    SHP_WELCOME = 64,  /* answers HELLO; carries the hints page as SCM_RIGHTS, since version 2 also the pulse page */
    SHP_GRANT = 65,    /* the token: launches may pass until the quantum ends or REVOKE comes */
    SHP_REVOKE = 66,   /* close the gate, drain, answer DRAINED */
    SHP_RESERVED = 67, /* answers RESERVE */
    SHP_RECALL = 68,   /* return idle credits, a sibling needs them; answered by RELEASE frames, the last flagged */
    SHP_MEMORY = 69,   /* answers MEMINFO */
    SHP_LIMITS = 70,   /* the terms have changed; same content as WELCOME, no descriptor */
    SHP_REFUSED = 71   /* the connection is about to be closed, with the reason */
};

/* Flags of shp_hello.flags */
enum {
    SHP_HELLO_NO_MEMBARRIER = 1, /* membarrier is forbidden: every launch takes a full fence */
    SHP_HELLO_OBSERVES = 2       /* uses no GPU: sends only MEMINFO, and does not count as a process of the tenant */
};

/* Flags of shp_gpu.flags */
enum { SHP_GPU_MEMORY_ENFORCED = 1 /* memory is limited; without the flag it is counted, never refused */ };

/* Flags of shp_grant.flags */
enum {
    SHP_GRANT_METERED = 1,  /* others wait or the ceiling binds: keep the queue of unfinished GPU work short */
    SHP_GRANT_ANNOUNCE = 2, /* DRAINING may be sent under this grant: the next grant can be on its way before DRAINED */
    SHP_GRANT_RENEWS = 4,   /* new terms of a held grant; a client that has already drained it ignores them */
    SHP_GRANT_SHORT = 8,    /* keep the metered queue short: launch when earlier launches are about to end */
    SHP_GRANT_PROMPT = 16,  /* return the token as soon as the work has ended: check for that often */
    SHP_GRANT_CONCURRENT = 32 /* other tenants may hold the GPUs at the same time: sample whether work is in flight.
                                 Since version 3 */
};

/* Flags of shp_drained.flags */
enum {
    SHP_DRAINED_WANT = 1, /* a thread is waiting at the gate: counts as WANT */
    SHP_DRAINED_IDLE = 2  /* returned early, because nothing was launched for a while */
};

/* Flags of shp_reserve.flags */
enum {
    SHP_RESERVE_HANDOVER = 1, /* the process holds them from an earlier connection: credited even over the limit */
    SHP_RESERVE_GROWN = 2, /* the driver took them without a call that could have been refused: credited even over the
                              limit, and counted */
    SHP_RESERVE_AHEAD = 4  /* more than the call needs: answered at once, nothing is recalled for it, and a refusal is
                              no denied allocation; the client asks for less */
};

/* Flags of shp_release.flags */
enum { SHP_RELEASE_RECALLED = 1 /* the last RELEASE that answers a RECALL; bytes may be 0 */ };

/* shp_reserved.status */
enum shp_reserve_status {
    SHP_RESERVE_OK = 0,
    SHP_RESERVE_OVER_LIMIT = 1 /* over the tenant's limit, even after siblings returned their idle credits */
};

/* shp_refused.reason */
enum shp_refused_reason {
    SHP_REFUSED_VERSION = 1,   /* no version in common */
    SHP_REFUSED_RELEASING = 2, /* the tenant's reservation is being released: its programs can no longer launch */
    SHP_REFUSED_FULL = 3       /* the tenant has its maximum of connected processes: retry, launch nothing */
};

struct shp_header {
    uint32_t magic;
    uint16_t version; /* of this frame's format; in HELLO: version_min */
    uint16_t type;    /* enum shp_type */
    uint32_t size;    /* of the whole frame, header included */
    uint32_t seq;     /* number of a client's request, copied into its answer; 0: no answer is expected */
};

struct shp_hello {
    struct shp_header header;
    uint16_t version_min;
    uint16_t version_max;
    uint32_t flags;
    char build[64]; /* content hash of the hook, hexadecimal, zero-terminated: for metrics and messages only */
};

struct shp_want {
    struct shp_header header;
    uint32_t gpu_mask; /* bit i: shp_welcome.gpus[i]; a hook of version 1 asks for all of them, granted as a gang */
    uint32_t reserved;
};

struct shp_drained {
    struct shp_header header;
    uint64_t grant_id;
    uint64_t launches; /* launches that passed during the grant: a statistic, not trusted */
    uint32_t flags;
    uint32_t reserved;
};

struct shp_draining {
    struct shp_header header;
    uint64_t grant_id;
    uint64_t expected_ns; /* from sending until the GPU is expected to have finished. A hint: the sender is charged
                             until DRAINED */
};

struct shp_reserve {
    struct shp_header header;
    uint32_t gpu; /* index into shp_welcome.gpus */
    uint32_t flags;
    uint64_t bytes; /* > 0 */
};

struct shp_release {
    struct shp_header header;
    uint32_t gpu;
    uint32_t flags;
    uint64_t bytes;
};

struct shp_meminfo {
    struct shp_header header;
    uint32_t gpu;
    uint32_t reserved;
    uint64_t idle; /* credited bytes of this process that no allocation uses */
};

/* One GPU of the tenant. */
struct shp_gpu {
    uint8_t uuid[SHP_UUID_BYTES];
    uint32_t request_milli;
    uint32_t limit_milli;
    uint64_t memory; /* bytes: the tenant's limit on this GPU, all its processes together */
    uint32_t flags;
    uint32_t context_kib; /* KiB that a process's context takes beyond what calls ask for; 0: unknown */
};

struct shp_welcome { /* also the layout of LIMITS */
    struct shp_header header;
    uint32_t gpu_count; /* 1 to SHP_MAX_GPUS */
    uint32_t grace_ms;  /* longest wait of closing the gate for a thread inside a launch, in ms */
    struct shp_gpu gpus[SHP_MAX_GPUS];
};

struct shp_grant {
    struct shp_header header;
    uint64_t grant_id;   /* the same for every process of the tenant that shares the token */
    uint64_t quantum_ns; /* from receipt; 0: until REVOKE */
    uint32_t gpu_mask;
    uint32_t flags;
};

struct shp_revoke {
    struct shp_header header;
    uint64_t grant_id;
};

struct shp_reserved {
    struct shp_header header;
    uint32_t gpu;
    uint32_t status; /* enum shp_reserve_status */
    uint64_t bytes;  /* credited: the requested bytes when OK, else 0 */
};

struct shp_recall {
    struct shp_header header;
    uint32_t gpu;
    uint32_t reserved;
    uint64_t bytes; /* needed; a client returns its idle credits up to this */
};

struct shp_memory {
    struct shp_header header;
    uint32_t gpu;
    uint32_t reserved;
    uint64_t limit;
    uint64_t used; /* by all processes of the tenant */
};

struct shp_refused {
    struct shp_header header;
    uint32_t reason; /* enum shp_refused_reason */
    uint32_t reserved;
    char text[SHP_TEXT_BYTES];
};

/* The hints page: a memfd that the agent maps writable and then seals (SHRINK, GROW, FUTURE_WRITE, SEAL); a client maps
 * it read-only. A stale hint costs time, never correctness. A child of fork does not inherit the mapping.
 *
 * `barred` is not a hint: no launch begins under a metered grant with this id or a lower one. The agent sets it to
 * revoke the token from processes that cannot return it, because they have no processor time.
 */
struct shp_hints {
    uint32_t magic; /* SHP_MAGIC */
    uint32_t version;
    uint32_t contended;         /* 1 while another tenant wants one of these GPUs */
    uint32_t limits_generation; /* counts LIMITS frames sent */
    uint64_t barred;            /* since version 2; 0: no grant */
    /* Since version 3: how often another tenant has begun or ceased to hold one of these GPUs together with this one;
     * odd while one does. */
    uint64_t co_runs;
};

/* The pulse page: a memfd of one connection, sealed (SHRINK, GROW, SEAL), which the client writes and the agent reads.
 *
 * The thread that would return the token writes it whenever it runs: each 0.5 ms while another tenant wants one of the
 * GPUs (under SHP_GRANT_CONCURRENT with each sample, 1 ms apart at most), each 2.5 ms after the gate was closed. A
 * recently barred client also writes it each 0.5 ms while it waits for the token. `beat_at` is written last.
 */
struct shp_pulse {
    uint64_t grant_id; /* of the grant that is held, or that is not drained; 0: none */
    uint64_t ends_at;  /* expected end of the work launched so far; 0: not known. Not 0 without a grant: the client
                        * waits for the token, and keeps writing */
    uint64_t beat_at;  /* time of this write */
    /* Since version 3. They count from the beginning of the connection, and only grow. */
    uint64_t samples; /* random moments, under grants with SHP_GRANT_CONCURRENT, at which the client checked its work */
    uint64_t in_flight; /* samples with unfinished launched work */
    uint64_t launches;  /* launches that have passed the gate, as of the last sample, or of DRAINED */
    uint64_t several;   /* samples with unfinished work in several streams */
};

/* The file `limits` next to the socket is text, one line per GPU, replaced by rename:
 *
 *     gpu <uuid> request <milli> limit <milli> memory <bytes> enforced <0|1>
 *
 * and, where it is known, at the end of the line " context <kib>", as shp_gpu.context_kib.
 *
 * The hook uses it while there is no agent. Lines that begin with anything but "gpu " are skipped. If the file is
 * missing and does not appear, CUDA calls fail. With the file `fail-open` next to it they succeed instead, without
 * share and limit.
 */

#endif
