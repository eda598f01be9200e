/* Modules and their kernels. */
#ifndef FAKECUDA_MODULE_H
#define FAKECUDA_MODULE_H

#include "device/fake.h"

/* Set (`set` not NULL) or get a function's attribute. `value` is unchanged if the attribute was never set. */
CUresult fake_function_attribute(CUfunction function, CUfunction_attribute attribute, const int *set, int *value);

/* Get the work of one launch. Return CUDA_ERROR_INVALID_HANDLE if there is no such kernel, CUDA_ERROR_INVALID_VALUE if
 * arguments are missing, and CUDA_ERROR_OUT_OF_MEMORY if the kernel's code must be loaded now and the device is full.
 * Without fake_lock. */
CUresult fake_kernel_work(CUfunction function, void *const *arguments, struct work *work);
/* Unload the modules of a context that ends. With fake_lock. */
void fake_modules_of_context_gone(struct context *context);

#endif
