/* What the sources of this double share. */
#pragma once

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
