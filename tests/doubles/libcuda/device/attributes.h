/* Attributes of the simulated devices, which are all alike. */
#ifndef FAKECUDA_ATTRIBUTES_H
#define FAKECUDA_ATTRIBUTES_H

#include <cuda.h>
#include <stdbool.h>

/* Get an attribute. Return false if there is no attribute with this number. */
bool fake_attribute(CUdevice_attribute attribute, int *value);

#endif
