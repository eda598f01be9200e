/* Address ranges of this process: device memory, reserved addresses, registered host memory. With fake_lock.
 *
 * Guarantee: addresses are assigned in ascending order and never twice. No host memory is behind addresses of device
 * memory, so programs must not access them.
 */
#ifndef FAKECUDA_RANGES_H
#define FAKECUDA_RANGES_H

#include "device/fake.h"

enum range_kind {
    RANGE_LINEAR,
    RANGE_MANAGED,
    RANGE_POOL,        /* stream-ordered */
    RANGE_GRAPH,       /* memory of an allocation node */
    RANGE_RESERVATION, /* cuMemAddressReserve */
    RANGE_IPC,         /* memory of another process, opened here */
    RANGE_GLOBAL,      /* a module's variable */
    RANGE_EXTERNAL,    /* a buffer of imported external memory */
    RANGE_HOST
};

struct range {
    CUdeviceptr address;
    uint64_t bytes; /* bytes, rounded up to the granularity */
    uint64_t asked; /* bytes that the program requested */
    enum range_kind kind;
    int device;
    struct context *context;
    void *object; /* owner: a pool, a graph, a mapping's handle, or the memory of cuMemAllocHost */
    uint64_t id;  /* unique in the process */
    bool shared;  /* other processes may open it (fake_state_share) */
    int opened;   /* of an imported pool: place in the table of shared memory */
};

/* Return a number that is unique in the process. */
uint64_t fake_new_id(void);
/* Assign an address to a range, a multiple of `alignment`, and add the range to the tree. `wanted` 0: any address.
 * Return NULL if `wanted` is in use. */
struct range *fake_range_add(struct range range, uint64_t alignment, CUdeviceptr wanted);
/* Add a range below 4 GiB, for the 32-bit forms of CUDA 3.1 and earlier. */
struct range *fake_range_add_low(struct range range);
/* Return the range that contains the address, or an empty range that begins at it; NULL: none. */
struct range *fake_range_holding(CUdeviceptr address);
struct range *fake_range_at(CUdeviceptr address);
void fake_range_remove(struct range *range);
/* Return whether all of the bytes are known device memory. */
bool fake_range_on_device(CUdeviceptr address, uint64_t bytes);
/* Return one of the context's ranges of this kind, in no particular order; NULL: none is left. */
struct range *fake_range_of_context(const struct context *context, enum range_kind kind);

#endif
