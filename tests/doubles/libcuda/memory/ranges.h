/* Address ranges of this process: device memory, reserved addresses, registered host memory. With fake_lock.
 *
 * Guarantee: addresses are given out upwards and never twice. Nothing lies behind those of device memory.
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
    RANGE_IPC,         /* memory of another process, opened here */
    RANGE_GLOBAL,      /* a module's variable */
    RANGE_EXTERNAL,    /* a buffer of imported external memory */
    RANGE_HOST
};

struct range {
    CUdeviceptr address;
    uint64_t bytes; /* rounded to the granularity */
    uint64_t asked; /* bytes as the program asked for them */
    enum range_kind kind;
    int device;
    struct context *context;
    void *object; /* its owner: a pool, a graph, a mapping's handle, the memory of cuMemAllocHost */
    uint64_t id;  /* unique in the process */
    bool shared;  /* other processes may open it (fake_state_share) */
    int opened;   /* of an imported pool: its place in the table of shared memory */
};

/* Return a number that nothing else of the process has. */
uint64_t fake_new_id(void);
/* Give a range an address, a multiple of `alignment`, and keep it; `wanted` 0: any. NULL if `wanted` is taken. */
struct range *fake_range_add(struct range range, uint64_t alignment, CUdeviceptr wanted);
/* Keep a range below 4 GiB, for the 32-bit forms of CUDA 3.1 and before. */
struct range *fake_range_add_low(struct range range);
/* Return the range that holds the address, or that begins at it; NULL if none does. */
struct range *fake_range_holding(CUdeviceptr address);
struct range *fake_range_at(CUdeviceptr address);
void fake_range_remove(struct range *range);
/* Return whether all of the bytes are known device memory. */
bool fake_range_on_device(CUdeviceptr address, uint64_t bytes);
/* Return one of the context's ranges of that kind; NULL if there is none. */
struct range *fake_range_of_context(const struct context *context, enum range_kind kind);

#endif
