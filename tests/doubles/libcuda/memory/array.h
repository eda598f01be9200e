/* Arrays: memory without an address. */
#ifndef FAKECUDA_ARRAY_H
#define FAKECUDA_ARRAY_H

#include "device/fake.h"

/* Return the bytes of one element, all channels; `handle`: a valid array. */
unsigned fake_array_element_bytes(CUarray handle);
/* Return whether `bytes` bytes from `offset` on are within the array. `handle`: a valid array. */
bool fake_array_holds(CUarray handle, size_t offset, size_t bytes);
/* Create a mipmapped array in external memory, which takes no device memory itself. */
CUresult fake_mipmap_elsewhere(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned levels);
/* Return whether the array, or mipmapped array, takes no memory itself, so that memory can be mapped to it. */
bool fake_array_maps(const void *array);
void fake_arrays_of_context_gone(struct context *context);

#endif
