/* Physical memory with handles (cuMemCreate), as used by multicast objects, sparse arrays and dma-buf. With fake_lock.
 */
#ifndef FAKECUDA_VIRTUAL_H
#define FAKECUDA_VIRTUAL_H

#include "device/fake.h"

struct physical {
    unsigned magic;
    unsigned references, mappings;
    unsigned exports; /* number of its descriptors that are open in any process */
    int lease;        /* of imported memory: lease that keeps the memory taken in the exporting process; -1: not
                         imported */
    int opened;       /* of imported memory: place in the table of shared memory; -1: none */
    bool shared;      /* other processes may open it */
    uint64_t id;      /* unique in the process */
    int device;       /* -1: host memory, or a multicast object */
    uint64_t bytes;
    uint64_t charged; /* bytes taken on the device; 0: imported */
    CUmemAllocationProp properties;
    struct physical *next_free;
};

struct physical *fake_physical_new(int device, uint64_t bytes, uint64_t charged, const CUmemAllocationProp *how);
/* Return the physical memory of a handle to which the program has a reference; NULL: there is none. */
struct physical *fake_physical_held(CUmemGenericAllocationHandle handle);
/* Return the physical memory that is mapped at the address; NULL: none. `*left`: bytes from the address to the end of
 * the mapping. */
struct physical *fake_physical_at(CUdeviceptr address, uint64_t *left);
/* Return the physical memory that is mapped at the address for at least `bytes` bytes; NULL: none. */
struct physical *fake_physical_mapped(CUdeviceptr address, uint64_t bytes);
/* Count a mapping, which keeps the memory taken. */
void fake_physical_map(struct physical *physical);
void fake_physical_unmap(struct physical *physical);

#endif
