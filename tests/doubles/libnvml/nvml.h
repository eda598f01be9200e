/* Error codes and functions that the sources of the double of NVML share. */
#pragma once

#include <stdbool.h>

#define EXPORT __attribute__((visibility("default")))

enum {
    NVML_SUCCESS = 0,
    NVML_UNINITIALIZED = 1,
    NVML_INVALID_ARGUMENT = 2,
    NVML_NOT_SUPPORTED = 3,
    NVML_NOT_FOUND = 6,
    NVML_INSUFFICIENT_SIZE = 7,
    NVML_DRIVER_NOT_LOADED = 9,
    NVML_ARGUMENT_VERSION_MISMATCH = 25
};

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **out);

/* Return the device of a handle; -1 if it is none. */
int fake_nvml_device(const void *handle);

/* Return whether every device is divided into MIG instances. */
bool fake_mig_mode(void);

/* Return the handle of an instance of a device; NULL: the device has no such instance. */
void *fake_mig_handle(int device, unsigned instance);

/* Return whether a handle is that of a MIG instance. If so, store its GPU in `device` and its number in `instance`. */
bool fake_mig_instance(const void *handle, int *device, unsigned *instance);
