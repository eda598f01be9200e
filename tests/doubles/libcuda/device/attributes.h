/* Attributes of the simulated devices, all alike. */
#ifndef FAKECUDA_ATTRIBUTES_H
#define FAKECUDA_ATTRIBUTES_H

#include <cuda.h>
#include <stdbool.h>

/* Get an attribute. False: there is none of that number. */
bool fake_attribute(CUdevice_attribute attribute, int *value);

#endif
