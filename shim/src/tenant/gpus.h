/* Table of the tenant's GPUs: the share of each, and the memory that this process holds there.
 *
 * Guarantees:
 * - A GPU keeps its place (index in struct gpus) for the life of the process.
 * - A GPU that is no longer granted stays in the table, with its last share.
 * - `used` <= `credited` for every GPU.
 */
#ifndef SHAREPOD_GPUS_H
#define SHAREPOD_GPUS_H

#include <cuda.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "sharepod/protocol.h"
#include "base/sys.h"

struct gpu {
    uint8_t uuid[SHP_UUID_BYTES];
    _Atomic int wire;        /* the agent's index of the GPU in frames; -1: WELCOME of the present connection did not
                                contain it */
    uint32_t request, limit; /* thousandths of the GPU's time */
    uint64_t memory;         /* bytes: memory limit of all processes of the tenant together */
    bool enforced;           /* true: allocations over `memory` are refused. False: memory is only counted */
    uint64_t context;        /* bytes that the first context of a process takes; 0: unknown */
    uint64_t credited;       /* bytes that the agent counts for this process */
    uint64_t used;           /* bytes of `credited` that are in use by allocations and by calls under way */
    uint64_t siblings;       /* bytes in use by the tenant's other processes, by the agent's last report */
    bool siblings_known;     /* the agent has reported `siblings` */
    uint64_t unreported;     /* bytes of `credited` that the driver has allocated without a grant, and that are not
                                reported to the agent yet */
    uint32_t unanswered;     /* number of recalls whose credits were returned, but whose final RELEASE could not be sent
                                yet */
    bool tight;              /* the limit was lowered: no credits are kept idle until the agent grants some again */
    bool watched;            /* the hook thread checks this GPU's idle credits, and sends failed reports again */
    uint64_t idle_least;     /* bytes: minimum of the idle credits (`credited` - `used`) since the hook thread's last
                                check */
    uint64_t idle_look;      /* sys_now() of the hook thread's next check; only the hook thread uses it */
    uint64_t kept;   /* bytes that may stay idle, because the program allocates as many again soon after it has freed
                        them */
    uint64_t parted; /* bytes that were returned to the agent, less the bytes requested again within a second */
    uint64_t parted_last; /* sys_now() of the last such return */
};

enum { GPUS_DEVICES = 64 }; /* number of CUDA devices in `places`: four times as many as a tenant may have */

struct gpus {
    struct lock lock; /* guards this struct and struct memory; "the lock" in comments here and in memory/ */
    unsigned count;
    _Atomic bool ungated; /* no share is known, and the agent's setting fail_open is on: launches and allocations are
                             not limited */
    struct gpu gpus[SHP_MAX_GPUS];
    /* Callback: the enforced memory limit of the GPU at `place` was lowered from `before` bytes. NULL: none. Called
     * while the lock is held. */
    void (*lowered)(int place, uint64_t before);
    _Atomic int8_t places[GPUS_DEVICES]; /* by CUDA device ordinal: 0: not looked up; -1: not a GPU of the tenant; else
                                            place + 1 */
};

/* Store the tenant's shares. `connected`: true if they come from the agent; the index in `granted` is then the GPU's
 * index in frames. The caller holds the lock. */
void gpus_learn(struct gpus *gpus, const struct shp_gpu *granted, unsigned count, bool connected);
/* Store the memory use of the tenant's other processes: `used` minus `own` bytes. The caller holds the lock. */
void gpus_learn_siblings(struct gpu *gpu, uint64_t used, uint64_t own);
/* Clear the indices in frames after the connection is lost. The caller holds the lock. */
void gpus_disconnect(struct gpus *gpus);
/* Return the GPU with this index in frames; NULL: there is none. The caller holds the lock. */
struct gpu *gpus_by_wire(struct gpus *gpus, uint32_t wire);
/* Results of gpus_place for devices without a place. GPUS_FOREIGN: not a GPU of this tenant. GPUS_NO_DEVICE: no such
 * device. */
enum { GPUS_FOREIGN = -1, GPUS_NO_DEVICE = -2 };
/* Return the place of a CUDA device, or GPUS_FOREIGN or GPUS_NO_DEVICE. The caller must not hold the lock. */
int gpus_place(struct gpus *gpus, CUdevice device);
/* Return whether launches pass without a gate, and memory is neither counted nor refused. */
static inline bool gpus_ungated(const struct gpus *gpus) {
    return atomic_load_explicit(&gpus->ungated, memory_order_relaxed);
}
/* Return the smallest request of all GPUs, in thousandths. Without an agent, the hook holds all GPUs for this part of
 * the time. The caller must not hold the lock. */
uint32_t gpus_request(struct gpus *gpus);

#endif
