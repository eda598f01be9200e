/* Physical memory behind handles, for those who map it by other means than addresses. With fake_lock. */
#ifndef FAKECUDA_VIRTUAL_H
#define FAKECUDA_VIRTUAL_H

#include "device/fake.h"

struct physical {
    unsigned magic;
    unsigned references, mappings;
    int device; /* -1: host memory, or a multicast object */
    uint64_t bytes;
    uint64_t charged; /* 0 for what was imported */
    CUmemAllocationProp properties;
    struct physical *next_free;
};

struct physical *fake_physical_new(int device, uint64_t bytes, uint64_t charged, const CUmemAllocationProp *how);
/* Of a handle that the program may use: one that it holds no reference to is none of its own. Else NULL. */
struct physical *fake_physical_held(CUmemGenericAllocationHandle handle);
/* What is mapped at the address, for as many bytes; NULL if nothing is. */
struct physical *fake_physical_mapped(CUdeviceptr address, uint64_t bytes);
/* As long as it is mapped somewhere its bytes stay. */
void fake_physical_map(struct physical *physical);
void fake_physical_unmap(struct physical *physical);

#endif
