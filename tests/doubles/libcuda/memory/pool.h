/* Stream-ordered memory and its pools. With fake_lock. */
#ifndef FAKECUDA_POOL_H
#define FAKECUDA_POOL_H

#include "memory/ranges.h"

struct pool {
    unsigned magic;
    int device;          /* -1: of host memory, which nobody counts */
    bool destroyed, own; /* own: made by cuMemPoolCreate or imported */
    bool imported;       /* another process's: nothing is allocated from it here */
    uint64_t reserved, used, reserved_high, used_high;
    uint64_t threshold, most;
    uint64_t returning; /* freed, and the work before that is not over */
    struct freed *freed;
    int settings[CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES + 1];
    CUmemAllocationHandleType handles; /* by which it can be exported */
    struct pool *next;
};

struct pool *fake_pool_new(int device, uint64_t most, bool own);
/* NULL if the handle is no pool's, or one's that is destroyed. */
struct pool *fake_pool_of(CUmemoryPool handle);
/* Which cuMemAllocAsync takes from. */
struct pool *fake_pool_current(int device);
void fake_pool_not_current(const struct pool *pool);
/* The range's bytes go back to its pool, now. The range itself stays the caller's. */
void fake_pool_return(struct range *range);
/* The host has waited for work of the device: what the pools hold above their thresholds goes back to it. */
void fake_pools_waited(int device);

#endif
