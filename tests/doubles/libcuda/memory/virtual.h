/* Physical memory behind handles, for mappings other than to addresses. With fake_lock. */
#ifndef FAKECUDA_VIRTUAL_H
#define FAKECUDA_VIRTUAL_H

#include "device/fake.h"

struct physical {
    unsigned magic;
    unsigned references, mappings;
    unsigned exports; /* descriptors of it that are open somewhere */
    int lease;        /* imported: keeps it where it was made; -1: not imported */
    int opened;       /* imported: its place in the table of shared memory; -1: none */
    bool shared;      /* other processes may open it */
    uint64_t id;      /* unique in the process */
    int device;       /* -1: host memory, or a multicast object */
    uint64_t bytes;
    uint64_t charged; /* bytes taken of the device; 0: imported */
    CUmemAllocationProp properties;
    struct physical *next_free;
};

struct physical *fake_physical_new(int device, uint64_t bytes, uint64_t charged, const CUmemAllocationProp *how);
/* Return the physical memory of a handle that the program holds a reference to; otherwise NULL. */
struct physical *fake_physical_held(CUmemGenericAllocationHandle handle);
/* Return the memory that is mapped at the address, and the bytes of its mapping from there on; NULL if none is. */
struct physical *fake_physical_at(CUdeviceptr address, uint64_t *left);
/* Return the memory that is mapped at the address for as many bytes; NULL if none is. */
struct physical *fake_physical_mapped(CUdeviceptr address, uint64_t bytes);
/* Count a mapping: mapped memory stays. */
void fake_physical_map(struct physical *physical);
void fake_physical_unmap(struct physical *physical);

#endif
