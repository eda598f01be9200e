/* Kernels: what a launch runs. */
#ifndef FAKECUDA_MODULE_H
#define FAKECUDA_MODULE_H

#include "device/fake.h"

/* The work of one launch; INVALID_HANDLE if that is no kernel, INVALID_VALUE without the arguments that it needs,
 * OUT_OF_MEMORY if its code is loaded only now and the device is full. Without fake_lock. */
CUresult fake_kernel_work(CUfunction function, void *const *arguments, struct work *work);
/* What is loaded in the context ends with it. With fake_lock. */
void fake_modules_of_context_gone(struct context *context);

#endif
