/* Arrays: memory without an address. */
#ifndef FAKECUDA_ARRAY_H
#define FAKECUDA_ARRAY_H

#include "device/fake.h"

/* Bytes of one element, all its channels; of a handle that fake_is an array. */
unsigned fake_array_element_bytes(CUarray handle);
/* A mipmapped array whose memory another interface holds. */
CUresult fake_mipmap_elsewhere(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned levels);
/* Whether memory can be mapped to the array or mipmapped array, which has none by itself. */
bool fake_array_maps(const void *array);
void fake_arrays_of_context_gone(struct context *context);

#endif
