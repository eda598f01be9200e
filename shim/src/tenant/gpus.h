/* The tenant's GPUs: the grant on each, and the memory that this process holds there.
 *
 * Guarantees:
 * - A GPU keeps its place (index in struct gpus) for the life of the process.
 * - A GPU that is no longer granted stays in the table, with its last grant.
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
    _Atomic int wire;        /* index on the wire, -1: not in the present connection */
    uint32_t request, limit; /* thousandths of the GPU's time */
    uint64_t memory;         /* bytes: the limit of all the tenant's processes together */
    bool enforced;           /* `memory` is a limit; else memory is counted, never refused */
    uint64_t context;        /* bytes that the first context of a process takes; 0: unknown */
    uint64_t credited;       /* bytes the agent counts for this process */
    uint64_t used;           /* part of `credited` in use, by allocations and calls under way */
    uint64_t siblings;       /* bytes of the tenant's other processes, as the agent last reported */
    bool siblings_known;     /* the agent has reported them */
    uint64_t untold;         /* of these, bytes that the driver took and that are not yet reported to the agent */
    uint32_t unanswered;     /* recalls that have been acted on, and whose answer could not be sent yet */
    bool tight;           /* the limit was lowered: nothing is kept idle until the agent has granted something again */
    bool watched;         /* the hook thread checks idle credits and retries failed reports */
    uint64_t idle_least;  /* bytes: the least that was idle since the hook thread's last check */
    uint64_t idle_look;   /* sys_now() of its next check; the hook thread's */
    uint64_t kept;        /* bytes that may lie idle because the program took as many again soon after it freed them */
    uint64_t parted;      /* bytes returned since the program last paused, less the bytes allocated again */
    uint64_t parted_last; /* sys_now() when some were last returned */
};

enum { GPUS_DEVICES = 64 }; /* device ordinals of CUDA: four times the GPUs that a tenant may have */

struct gpus {
    struct lock lock; /* for all of it, and for struct memory */
    unsigned count;
    _Atomic bool ungated; /* without `limits`, and the agent's setting fail_open: until something has been learned */
    struct gpu gpus[SHP_MAX_GPUS];
    /* Called when the limit of a place was lowered from `before` bytes, if it is enforced; NULL: no callback. With the
     * lock. */
    void (*lowered)(int place, uint64_t before);
    _Atomic int8_t places[GPUS_DEVICES]; /* of CUDA's device ordinals: 0 not looked up, else place + 1 */
};

/* Store the grants. `connected`: `granted` has the order of the wire. With the lock. */
void gpus_learn(struct gpus *gpus, const struct shp_gpu *granted, unsigned count, bool connected);
/* Store the usage of the tenant's other processes: `used` less `own` bytes. With the lock. */
void gpus_learn_siblings(struct gpu *gpu, uint64_t used, uint64_t own);
/* Drop the numbers on the wire after the connection is lost. With the lock. */
void gpus_disconnect(struct gpus *gpus);
/* Return the GPU of a number on the wire; NULL: none. With the lock. */
struct gpu *gpus_by_wire(struct gpus *gpus, uint32_t wire);
/* Results of gpus_place for devices without a place: another tenant's, and devices that do not exist. */
enum { GPUS_FOREIGN = -1, GPUS_NO_DEVICE = -2 };
/* Return the place of a CUDA device; negative: none of the tenant's. Without the lock. */
int gpus_place(struct gpus *gpus, CUdevice device);
/* Return whether nothing is gated and no memory is counted or refused. */
static inline bool gpus_ungated(const struct gpus *gpus) {
    return atomic_load_explicit(&gpus->ungated, memory_order_relaxed);
}
/* Return the least request of all GPUs, in thousandths: the request of a gang without an agent. Without the lock. */
uint32_t gpus_request(struct gpus *gpus);

#endif
