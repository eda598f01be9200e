/* The wire format between the hook (client, inside a tenant's process) and the agent (on the node).
 *
 * Each process has one SOCK_SEQPACKET connection, to the tenant's own socket. The socket identifies the tenant, so a
 * client sends no identity.
 *
 * Guarantees of both sides:
 * - A frame is one packet. It has the fixed size of its type, is in the host's byte order, and begins with shp_header.
 * - The receiver closes the connection after a zero-length packet, a wrong size, or a value out of range. The agent
 *   also closes it after an unknown type. A client ignores unknown types, which may come from a later version.
 * - Times are durations in nanoseconds, never points in time, because a container may have a time namespace of its own.
 *   Exception: points in time in the pulse page are of the client's clock, and only their differences have a meaning.
 * - Shares are integer thousandths of one GPU's time ("milli"). Sizes are in bytes.
 * - The agent supports every version since 1. A client offers [version_min, version_max] in HELLO, and the agent
 *   chooses one of them in WELCOME. A new version may add fields only in place of `reserved`, or in a new type.
 *
 * The header is compiled into the hook, and by cffi (API mode) into the agent. The agent's build fails if a struct
 * differs. Both parsers must understand the header, so it contains only enums, structs of fixed-width integers, and
 * #defines of plain numbers.
 */
#ifndef SHAREPOD_PROTOCOL_H
#define SHAREPOD_PROTOCOL_H

#include <stdint.h>

#define SHP_MAGIC 0x50485331 /* "1SHP" read as little-endian bytes */
#define SHP_VERSION_MIN 1
#define SHP_VERSION_MAX 3    /* 2: the pulse page, and `barred` in the hints page; 3: tenants that co-run */
#define SHP_MAX_GPUS 16      /* most GPUs of a tenant on one node */
#define SHP_UUID_BYTES 16    /* the bytes of the UUID in GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx */
#define SHP_TEXT_BYTES 160   /* zero-terminated UTF-8 */
#define SHP_FRAME_MAX 1024   /* bytes: no frame is larger */
#define SHP_HINTS_BYTES 4096 /* one page */
#define SHP_PULSE_BYTES 4096 /* one page */

enum shp_type {
    /* client to agent */
    SHP_HELLO = 1, /* first frame */
    SHP_WANT = 2,  /* requests the token: a thread waits at the gate. From a preempted tenant: requests its next turn */
    SHP_DRAINED = 3,  /* returns the token: the gate is closed, and all GPU work of the grant has finished */
    SHP_RESERVE = 4,  /* requests bytes of device memory; RESERVED with the same seq answers it */
    SHP_RELEASE = 5,  /* returns credited bytes */
    SHP_MEMINFO = 6,  /* requests the tenant's limit and memory use; MEMORY with the same seq answers it */
    SHP_DRAINING = 7, /* the gate is closed, and the last GPU work of the grant is ending: DRAINED follows */

    /* agent to client */
    SHP_WELCOME = 64,  /* answers HELLO. Carries the descriptor of the hints page (SCM_RIGHTS), since version 2 also of
                          the pulse page */
    SHP_GRANT = 65,    /* gives the token: launches may pass until the quantum ends or REVOKE arrives */
    SHP_REVOKE = 66,   /* requests that the client closes the gate, drains, and answers with DRAINED */
    SHP_RESERVED = 67, /* answers RESERVE */
    SHP_RECALL = 68,   /* requests idle credits, which a sibling process needs. RELEASE frames answer it, the last one
                          with a flag */
    SHP_MEMORY = 69,   /* answers MEMINFO */
    SHP_LIMITS = 70,   /* the tenant's terms have changed. Same layout as WELCOME, without a descriptor */
    SHP_REFUSED = 71   /* reports why the agent is about to close the connection */
};

/* Flags of shp_hello.flags */
enum {
    SHP_HELLO_NO_MEMBARRIER = 1, /* membarrier(2) is forbidden, so each launch executes a full memory fence */
    SHP_HELLO_OBSERVES = 2       /* the client uses no GPU: it sends only MEMINFO, and is not a process of the tenant */
};

/* Flags of shp_gpu.flags */
enum { SHP_GPU_MEMORY_ENFORCED = 1 /* memory is limited; without this flag it is counted and never refused */ };

/* Flags of shp_grant.flags */
enum {
    SHP_GRANT_METERED = 1,  /* keep the queue of unfinished GPU work short, because other tenants are connected or the
                               tenant's limit is below the whole GPU */
    SHP_GRANT_ANNOUNCE = 2, /* the client may send DRAINING, so that the agent can send the next grant before DRAINED */
    SHP_GRANT_RENEWS = 4,   /* new terms of a held grant. A client that has already drained the grant ignores them */
    SHP_GRANT_SHORT = 8,    /* keep the metered queue very short: launch only when earlier launches are about to end */
    SHP_GRANT_PROMPT = 16,  /* return the token as soon as the work has ended, and check often whether it has */
    SHP_GRANT_CONCURRENT = 32 /* other tenants may co-run: sample whether work is in flight. Since version 3 */
};

/* Flags of shp_drained.flags */
enum {
    SHP_DRAINED_WANT = 1, /* a thread waits at the gate: counts as WANT */
    SHP_DRAINED_IDLE = 2  /* the token is returned early, because nothing was launched for a while */
};

/* Flags of shp_reserve.flags */
enum {
    SHP_RESERVE_HANDOVER = 1, /* the process already held the bytes on an earlier connection: granted even over the
                                 limit */
    SHP_RESERVE_GROWN = 2,    /* the driver has allocated the bytes already, without a call that the hook could refuse:
                                 granted even over the limit, and counted */
    SHP_RESERVE_AHEAD = 4 /* more bytes than the call needs. The agent answers at once and recalls no idle credits of
                             sibling processes. A refusal does not count as a denied allocation, because the client then
                             requests less */
};

/* Flags of shp_release.flags */
enum { SHP_RELEASE_RECALLED = 1 /* the last RELEASE that answers a RECALL; `bytes` may be 0 */ };

/* shp_reserved.status */
enum shp_reserve_status {
    SHP_RESERVE_OK = 0,
    SHP_RESERVE_OVER_LIMIT = 1 /* the bytes exceed the tenant's limit, even after its other processes have returned
                                  their idle credits */
};

/* shp_refused.reason */
enum shp_refused_reason {
    SHP_REFUSED_VERSION = 1,   /* client and agent have no version in common */
    SHP_REFUSED_RELEASING = 2, /* the tenant's share of the GPU is being released: its programs can no longer launch */
    SHP_REFUSED_FULL = 3       /* the tenant has its maximum of connected processes: retry, launch nothing */
};

struct shp_header {
    uint32_t magic;
    uint16_t version; /* version of this frame's format; in HELLO: version_min */
    uint16_t type;    /* enum shp_type */
    uint32_t size;    /* bytes of the whole frame, with the header */
    uint32_t seq;     /* number that a client gives its request; the answer has the same. 0: no answer is expected */
};

struct shp_hello {
    struct shp_header header;
    uint16_t version_min;
    uint16_t version_max;
    uint32_t flags;
    char build[64]; /* content hash of the hook, hexadecimal, zero-terminated. Used only in metrics and messages */
};

struct shp_want {
    struct shp_header header;
    uint32_t gpu_mask; /* bit i: shp_welcome.gpus[i]. A hook of version 1 requests all, granted together */
    uint32_t reserved;
};

struct shp_drained {
    struct shp_header header;
    uint64_t grant_id;
    uint64_t launches; /* launches that passed during the grant. A statistic: the agent does not rely on it */
    uint32_t flags;
    uint32_t reserved;
};

struct shp_draining {
    struct shp_header header;
    uint64_t grant_id;
    uint64_t expected_ns; /* ns from sending until the GPU is expected to have finished. A hint: the tenant is charged
                             until DRAINED */
};

struct shp_reserve {
    struct shp_header header;
    uint32_t gpu; /* index in shp_welcome.gpus */
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
    uint64_t idle; /* bytes granted to this process that no allocation uses */
};

/* One GPU of the tenant. */
struct shp_gpu {
    uint8_t uuid[SHP_UUID_BYTES];
    uint32_t request_milli;
    uint32_t limit_milli;
    uint64_t memory; /* bytes: limit of all processes of the tenant together on this GPU */
    uint32_t flags;
    uint32_t context_kib; /* KiB of device memory that a CUDA context takes in each process, beyond the bytes that calls
                             request; 0: unknown */
};

struct shp_welcome { /* LIMITS has the same layout */
    struct shp_header header;
    uint32_t gpu_count; /* 1 to SHP_MAX_GPUS */
    uint32_t grace_ms;  /* longest time, in ms, that the hook waits for threads inside a launch call, at the
                           end of a turn */
    struct shp_gpu gpus[SHP_MAX_GPUS];
};

struct shp_grant {
    struct shp_header header;
    uint64_t grant_id;   /* the same for all processes of the tenant, which share the token */
    uint64_t quantum_ns; /* ns from receipt; 0: until REVOKE */
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
    uint64_t bytes;  /* granted bytes: the requested bytes if status is SHP_RESERVE_OK, else 0 */
};

struct shp_recall {
    struct shp_header header;
    uint32_t gpu;
    uint32_t reserved;
    uint64_t bytes; /* bytes that are needed: a client returns its idle credits up to this number */
};

struct shp_memory {
    struct shp_header header;
    uint32_t gpu;
    uint32_t reserved;
    uint64_t limit;
    uint64_t used; /* bytes in use by all processes of the tenant */
};

struct shp_refused {
    struct shp_header header;
    uint32_t reason; /* enum shp_refused_reason */
    uint32_t reserved;
    char text[SHP_TEXT_BYTES];
};

/* The hints page: a memfd that the agent maps writable and then seals (SHRINK, GROW, FUTURE_WRITE, SEAL). A client maps
 * it read-only. An outdated hint can delay launches, but breaks no guarantee. A child of fork does not inherit the
 * mapping.
 *
 * Unlike the other members, `barred` is binding: no launch begins under a metered grant with this id or a lower id.
 * With it the agent stops processes that cannot return the token, because they get no processor time.
 */
struct shp_hints {
    uint32_t magic; /* SHP_MAGIC */
    uint32_t version;
    uint32_t contended;         /* 1 while another tenant wants one of these GPUs */
    uint32_t limits_generation; /* number of LIMITS frames sent */
    uint64_t barred;            /* grant id; 0: no grant is barred. Since version 2 */
    /* Since version 3: number of times that another tenant has begun or ceased to co-run on one of these GPUs; odd
     * while one co-runs. */
    uint64_t co_runs;
};

/* The pulse page: a memfd of one connection, sealed (SHRINK, GROW, SEAL). The client writes it, and the agent reads it.
 *
 * The hook thread writes the page whenever it runs:
 * - every 0.5 ms while another tenant wants one of the GPUs; under SHP_GRANT_CONCURRENT with each sample, at most 1 ms
 *   apart;
 * - every 2.5 ms after the gate was closed;
 * - every 0.5 ms while a recently barred client waits for the token.
 *
 * `beat_at` is written last.
 */
struct shp_pulse {
    uint64_t grant_id; /* id of the grant that is held or not yet drained; 0: none */
    uint64_t ends_at;  /* expected end of the work launched so far; 0: not known. If it is not 0 while grant_id is 0,
                          the client waits for the token, and keeps writing the page */
    uint64_t beat_at;  /* time of this write */
    /* Since version 3. These numbers count from the start of the connection, and never fall. */
    uint64_t samples; /* random moments, under grants with SHP_GRANT_CONCURRENT, at which the client checked whether its
                         work is unfinished */
    uint64_t in_flight; /* samples with unfinished launched work */
    uint64_t launches;  /* launches that have passed the gate, as of the last sample or of DRAINED */
    uint64_t several;   /* samples with unfinished work in several streams */
};

/* The text file `limits` next to the socket has one line per GPU, and is replaced by rename:
 *
 *     gpu <uuid> request <milli> limit <milli> memory <bytes> enforced <0|1>
 *
 * If shp_gpu.context_kib is known, the line ends with " context <kib>".
 *
 * The hook uses the file while there is no agent. It skips lines that do not begin with "gpu ". If the file is missing
 * and does not appear, CUDA calls fail. With the file `fail-open` next to it, they succeed instead, without share and
 * limit.
 */

#endif
