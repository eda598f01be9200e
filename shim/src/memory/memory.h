/* Device memory: what a call will take is reserved before the driver is asked.
 *
 * Guarantees: on a GPU whose limit is enforced, no call returns success that takes what is counted over the limit; what
 * a failed call was to take, and what a freed thing took, goes back. Each of the files memory.c (linear memory and the
 * tenant's view), arrays.c, virtual.c, multicast.c, pools.c, graphmem.c and overhead.c (contexts and their limits)
 * wraps the calls of its kind; credits.c deals with the daemon.
 */
#ifndef SHAREPOD_MEMORY_H
#define SHAREPOD_MEMORY_H

#include <cuda.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "memory/allocations.h"
#include "base/slab.h"

struct growing;

/* With the lock of struct gpus. */
struct memory {
    struct holdings holdings;
    struct slab physical_slab, binding_slab;
    uint64_t largest_mapping; /* bytes */
    uint64_t sparse;          /* mappings into sparse arrays */
    struct growing *growing;
    struct slab growing_slab;
    bool growing_watched;
    uint64_t chunk;   /* pools grow by multiples of this or of a part of it; 0: not seen yet */
    uint64_t surplus; /* the most that one was seen to grow by beyond what its call needed: less than the step */
    uint64_t next_look;      /* the agent thread's */
    _Atomic bool graphs;     /* some graph may have memory nodes */
    uint32_t contexts[16];   /* of this process on each GPU */
    uint64_t overhead[16];   /* what they took */
    struct lock limit_lock;  /* cuCtxSetLimit, which reads and writes */
};

enum { MEMORY_GRANULARITY = 512 };

/* Up to a multiple of `step`, or, where there is none, more than any GPU has. */
uint64_t memory_rounded(uint64_t bytes, uint64_t step);
/* The current context and the place of its GPU (-1: none of the tenant's); what the driver says if there is none. */
CUresult memory_here(CUcontext *context, int *place);

/* Something that takes memory, on its way: reserved, to be made by the driver, then held or rolled back. */
struct charge {
    struct holding *holding; /* NULL: nothing is counted, the driver has the word */
};

/* On a GPU; `context`: what it ends with, or NULL. CUDA_ERROR_OUT_OF_MEMORY if the bytes are not to be had. */
CUresult charge_begin(struct charge *charge, CUcontext context, int place, uint64_t bytes);
void charge_end(struct charge *charge, bool made, enum holding_kind kind, uint64_t key);

/* Taken out before the driver frees it: its name may be given to another thread's at once. NULL: not counted. */
struct holding *uncharge_begin(enum holding_kind kind, uint64_t key);
void uncharge_end(struct holding *holding, bool freed);

/* The context is gone, and what was held in it. */
void memory_forget_context(CUcontext context);
/* Its holdings are booked under another handle, until it is known whether it has ended. */
void memory_rename_context(CUcontext from, CUcontext to);

/* The tenant's limit on a GPU and what all its processes use of it, asked of the daemon (1 s at most); false where it
 * is not enforced, or none of the tenant's. */
bool memory_view(int place, uint64_t *limit, uint64_t *used);

/* overhead.c: a context of that GPU is gone. */
void overhead_context_gone(int place);
/* virtual.c: an array is gone, and what was mapped into it. */
void virtual_array_gone(CUarray array);

#endif
