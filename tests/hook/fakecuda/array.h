/* Arrays: memory without an address. */
#ifndef FAKECUDA_ARRAY_H
#define FAKECUDA_ARRAY_H

#include "fake.h"

/* Bytes of one element, all its channels; of a handle that fake_is an array. */
unsigned fake_array_element_bytes(CUarray handle);
void fake_arrays_of_context_gone(struct context *context);

#endif
