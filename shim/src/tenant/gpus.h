/* The tenant's GPUs: what it was granted of each, and what this process holds of its memory.
 *
 * A GPU keeps its place here for the life of the process; its number on the wire is that of the present connection.
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
    uint32_t request, limit; /* thousandths */
    uint64_t memory;
    bool enforced;
    uint64_t context;  /* bytes that the first context of a process takes; 0: unknown */
    uint64_t credited; /* bytes the agent counts for this process */
    uint64_t used;     /* of these, by what is held or under way */
    bool tight;        /* the limit was lowered: nothing is kept idle until the agent has granted something again */
    bool watched;      /* the hook thread looks after idle credits */
    uint32_t moves, moves_seen; /* reservations and returns */
    uint64_t idle_until;
};

enum { GPUS_DEVICES = 64 };

struct gpus {
    struct lock lock; /* for all of it, and for struct memory */
    unsigned count;
    _Atomic bool ungated; /* without `limits`, and the agent's setting fail_open: until something has been learned */
    struct gpu gpus[SHP_MAX_GPUS];
    /* Is called when the limit of a place was lowered from `before` bytes, if it is enforced; NULL: nobody is. With the
     * lock. */
    void (*lowered)(int place, uint64_t before);
    _Atomic int8_t places[GPUS_DEVICES]; /* of CUDA's device ordinals: 0 not looked up, else place + 1 */
};

/* Takes over what was granted; `connected`: the order is that of the wire. With the lock. */
void gpus_learn(struct gpus *gpus, const struct shp_gpu *granted, unsigned count, bool connected);
/* The connection is gone. With the lock. */
void gpus_disconnect(struct gpus *gpus);
/* The GPU of a number on the wire; NULL: none. With the lock. */
struct gpu *gpus_by_wire(struct gpus *gpus, uint32_t wire);
/* The place of a CUDA device; -1 if it is none of the tenant's. Without the lock. */
int gpus_place(struct gpus *gpus, CUdevice device);
/* Whether nothing is gated and no memory counted or refused. */
static inline bool gpus_ungated(const struct gpus *gpus) {
    return atomic_load_explicit(&gpus->ungated, memory_order_relaxed);
}
/* The least request of all GPUs, thousandths: what a gang runs at without an agent. Without the lock. */
uint32_t gpus_request(struct gpus *gpus);

#endif
