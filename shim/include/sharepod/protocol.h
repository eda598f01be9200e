/* The wire format between the hook (client, inside a tenant's process) and the agent (on the node).
 *
 * One SOCK_SEQPACKET connection per process, on the tenant's own socket. The socket says which tenant it is: a client
 * says nothing about who it is.
 *
 * Guarantees of both sides:
 * - a frame is one packet of the fixed size of its type, in the host's byte order, and begins with shp_header;
 * - a zero-length packet, a wrong size or a value out of range closes the connection; so does a type that the agent
 * does not know, while a client ignores the types of a later version;
 * - times are durations in nanoseconds, never points in time: a container may have a time namespace of its own. In the
 *   pulse page points in time are those of the client's clock, of which only differences mean something;
 * - shares are integer thousandths of one GPU's time ("milli"); sizes are bytes;
 * - the agent speaks every version since 1. A client offers [version_min, version_max] in HELLO, the agent picks one in
 *   WELCOME. Fields are only ever added in place of `reserved`, or in a new type, with a new version.
 *
 * The header is compiled into the hook, and by cffi (API mode) into the agent, which refuses a struct that drifted. It
 * holds only what both parsers understand: enums, structs of fixed-width integers, and #defines of plain numbers.
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
    SHP_WANT = 2,     /* a thread waits at the gate: asks for the token; of an overdue holder: for its next turn */
    SHP_DRAINED = 3,  /* gate closed and all GPU work of the grant finished: gives the token back */
    SHP_RESERVE = 4,  /* asks for bytes of device memory; answered by RESERVED with the same seq */
    SHP_RELEASE = 5,  /* gives credited bytes back */
    SHP_MEMINFO = 6,  /* asks for the tenant's view of memory; answered by MEMORY with the same seq */
    SHP_DRAINING = 7, /* gate closed, the last GPU work of the grant is ending: DRAINED follows */

    /* agent to client */
    SHP_WELCOME = 64,  /* answers HELLO; carries the hints page as SCM_RIGHTS, since version 2 also the pulse page */
    SHP_GRANT = 65,    /* the token: launches may pass until the quantum ends or REVOKE comes */
    SHP_REVOKE = 66,   /* close the gate, drain, answer DRAINED */
    SHP_RESERVED = 67, /* answers RESERVE */
    SHP_RECALL = 68,   /* give back idle credits, a sibling needs them; answered by RELEASE frames, the last flagged */
    SHP_MEMORY = 69,   /* answers MEMINFO */
    SHP_LIMITS = 70,   /* what is granted has changed; same content as WELCOME, no descriptor */
    SHP_REFUSED = 71   /* the connection is about to be closed, and why */
};

/* Flags of shp_hello.flags */
enum {
    SHP_HELLO_NO_MEMBARRIER = 1, /* membarrier is forbidden: every launch takes a full fence */
    SHP_HELLO_OBSERVES = 2 /* uses no GPU: sends nothing but MEMINFO, and does not count as a process of the tenant */
};

/* Flags of shp_gpu.flags */
enum { SHP_GPU_MEMORY_ENFORCED = 1 /* memory is limited; without the flag it is counted, never refused */ };

/* Flags of shp_grant.flags */
enum {
    SHP_GRANT_METERED = 1,  /* others wait or the ceiling binds: keep the queue of unfinished GPU work short */
    SHP_GRANT_ANNOUNCE = 2, /* DRAINING may be sent under this grant: the next grant can be on its way before DRAINED */
    SHP_GRANT_RENEWS = 4,   /* new terms of a grant that is held; a client that has drained it meanwhile ignores them */
    SHP_GRANT_SHORT = 8,    /* keep the metered queue short: launch when what was launched is about to end */
    SHP_GRANT_PROMPT = 16,  /* give the token back as soon as the work has ended: look for that often */
    SHP_GRANT_CONCURRENT = 32 /* other tenants may hold the GPUs at the same time: sample whether work is in flight.
                                 Since version 3 */
};

/* Flags of shp_drained.flags */
enum {
    SHP_DRAINED_WANT = 1, /* a thread is waiting at the gate: counts as WANT */
    SHP_DRAINED_IDLE = 2  /* given back early, because nothing was launched for a while */
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
    SHP_RESERVE_OVER_LIMIT = 1 /* over the tenant's limit, even after siblings gave back their idle credits */
};

/* shp_refused.reason */
enum shp_refused_reason {
    SHP_REFUSED_VERSION = 1,   /* no version in common */
    SHP_REFUSED_RELEASING = 2, /* the tenant's reservation is ending: nothing more runs in its name */
    SHP_REFUSED_FULL = 3 /* the tenant has the most processes connected that it may have: try again, launch nothing */
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
    uint32_t grace_ms;  /* how long closing the gate may wait for a thread inside a launch */
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
    uint64_t bytes;  /* credited: what was asked when OK, else 0 */
};

struct shp_recall {
    struct shp_header header;
    uint32_t gpu;
    uint32_t reserved;
    uint64_t bytes; /* needed; a client gives back its idle credits up to this */
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
 * `barred` is no hint: no launch begins under a metered grant with this id or a lower one. The agent sets it when it
 * takes the token from processes that cannot give it back, because they have no processor time. */
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
 * The thread that would give the token back writes it whenever it runs: each 0.5 ms while another tenant wants one of
 * the GPUs (under SHP_GRANT_CONCURRENT with each sample, 1 ms apart at most), each 2.5 ms after the gate was closed.
 * One that was barred lately writes it each 0.5 ms while it waits for the token, too. `beat_at` is written last. */
struct shp_pulse {
    uint64_t grant_id; /* of the grant that is held, or that is not drained; 0: none */
    uint64_t ends_at;  /* when the work launched so far is expected to end; 0: not known. Without a grant not 0: the
                        * client waits for the token, and goes on writing meanwhile */
    uint64_t beat_at;  /* when this was written */
    /* Since version 3. They count from the beginning of the connection, and only grow. */
    uint64_t
        samples; /* random moments, under grants with SHP_GRANT_CONCURRENT, at which the client looked at its work */
    uint64_t in_flight; /* of these, the moments at which launched work was unfinished */
    uint64_t launches;  /* launches that have passed the gate, as of the last sample, or of DRAINED */
    uint64_t several;   /* of the samples, the moments at which work was unfinished in several streams */
};

/* The file `limits` beside the socket is text, one line per GPU, replaced by rename:
 *
 *     gpu <uuid> request <milli> limit <milli> memory <bytes> enforced <0|1>
 *
 * and, where it is known, at the end of the line " context <kib>", as shp_gpu.context_kib.
 *
 * The hook goes by it while there is no agent. Lines that begin with anything but "gpu " are skipped. Where there is no
 * such file, and none comes, no CUDA call succeeds; but where the file `fail-open` is beside it all do, with no share
 * and no limit.
 */

#endif
