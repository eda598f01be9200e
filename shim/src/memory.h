/* Device memory: every allocation is reserved with the daemon before the driver is asked.
 *
 * Guarantees: on a GPU whose limit is enforced, the bytes that this process's allocations use never exceed what the
 * daemon has credited to it; what a failed or freed allocation leaves goes back. Without a daemon nothing beyond the
 * credits in hand is allocated.
 */
#ifndef SHAREPOD_MEMORY_H
#define SHAREPOD_MEMORY_H

#include <cuda.h>
#include <stddef.h>
#include <stdint.h>

struct allocation {
    CUdeviceptr address; /* 0: a free place */
    CUcontext context;
    uint64_t bytes;
    int gpu;
};

struct memory {
    struct allocation *table; /* open addressing; with the lock of struct gpus */
    size_t capacity, count;
};

/* The context is gone, and its allocations with it. */
void memory_forget_context(CUcontext context);
/* Its allocations are booked under another handle, until it is known whether it has ended. */
void memory_rename_context(CUcontext from, CUcontext to);

/* For the agent thread: gives back up to `bytes` idle credits of that place; returns how many. With the lock of struct
 * gpus. */
uint64_t memory_recall(int place, uint64_t bytes);

#endif
