/* The address ranges of this process: device memory, reserved addresses, registered host memory.
 *
 * Addresses are given out upwards and never twice; nothing lies behind those of device memory. All with fake_lock.
 */
#ifndef FAKECUDA_RANGES_H
#define FAKECUDA_RANGES_H

#include "device/fake.h"

enum range_kind {
    RANGE_LINEAR,
    RANGE_MANAGED,
    RANGE_POOL,        /* stream-ordered */
    RANGE_GRAPH,       /* an allocation node's */
    RANGE_RESERVATION, /* cuMemAddressReserve */
    RANGE_IPC,         /* another process's memory, opened here */
    RANGE_GLOBAL,      /* a module's variable */
    RANGE_EXTERNAL,    /* a buffer of imported external memory */
    RANGE_HOST
};

struct range {
    CUdeviceptr address;
    uint64_t bytes; /* rounded */
    uint64_t asked;
    enum range_kind kind;
    int device;
    struct context *context;
    void *object; /* what it belongs to: a pool, a graph, a mapping's handle, the memory of cuMemAllocHost */
    uint64_t id;  /* no two ranges of a process have the same */
};

/* Gives the range an address, a multiple of `alignment`, and keeps it; `wanted` 0: any. NULL if `wanted` is taken. */
struct range *fake_range_add(struct range range, uint64_t alignment, CUdeviceptr wanted);
/* A range below 4 GiB, for the 32-bit forms of CUDA 3.1 and before. */
struct range *fake_range_add_low(struct range range);
/* The one that holds the address, or begins at it; NULL if none does. */
struct range *fake_range_holding(CUdeviceptr address);
struct range *fake_range_at(CUdeviceptr address);
void fake_range_remove(struct range *range);
/* Whether all of it is known device memory. */
bool fake_range_on_device(CUdeviceptr address, uint64_t bytes);
/* One of the context's ranges of the kind; NULL if there is none. */
struct range *fake_range_of_context(const struct context *context, enum range_kind kind);

#endif
