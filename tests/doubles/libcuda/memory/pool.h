/* Pools of stream-ordered memory. With fake_lock. */
#ifndef FAKECUDA_POOL_H
#define FAKECUDA_POOL_H

#include "memory/ranges.h"

struct pool {
    unsigned magic;
    int device;          /* -1: host memory, which is not counted */
    bool destroyed, own; /* `own`: created by cuMemPoolCreate, or imported */
    bool imported;       /* imported from another process: no memory is counted for it here */
    uint64_t reserved, used, reserved_high, used_high;
    uint64_t threshold, most;
    uint64_t returning; /* bytes freed on a stream whose work before the free has not ended */
    struct freed *freed;
    int settings[CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES + 1];
    CUmemAccess_flags access[FAKE_DEVICES]; /* access of each device */
    CUmemAllocationHandleType handles;      /* kinds of handle by which the pool can be exported */
    uint64_t id;
    bool shared; /* allocations of it were exported */
    struct pool *next;
};

struct pool *fake_pool_new(int device, uint64_t most, bool own);
/* Return the pool of a handle; NULL if there is none, or it is destroyed. */
struct pool *fake_pool_of(CUmemoryPool handle);
/* Return the device's current pool, which cuMemAllocAsync takes from. */
struct pool *fake_pool_current(int device);
void fake_pool_not_current(const struct pool *pool);
/* Return a range's bytes to its pool at once. The caller removes the range itself. */
void fake_pool_return(struct range *range);
/* Return unused memory above the pools' thresholds to the device. Called after the host has waited for the device's
 * work. */
void fake_pools_waited(int device);

#endif
