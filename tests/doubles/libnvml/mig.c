/* MIG instances in the double of NVML: with FAKE_NVML_MIG_MODE=1 every device is divided into two instances of one
 * slice each.
 *
 * Guarantees:
 * - Queries of NVIDIA's device plugin about instances return the same as with a real driver.
 * - Without FAKE_NVML_MIG_MODE, no device can be divided.
 * - No process runs on an instance.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/state.h"
#include "nvml.h"

/* INSTANCES: number per device. PROFILE: the only profile, of one slice (0), for both GPU instances and compute
 * instances. */
enum { INSTANCES = 2, PROFILE = 0, FIRST_ID = 7, SLICE_MIB = 4864 };

struct attributes {
    unsigned multiprocessors, copy_engines, decoders, encoders, jpeg, ofa, gpu_slices, compute_slices;
    unsigned long long memory_mib;
};

struct placement {
    unsigned start, size;
};

struct gpu_instance {
    void *device;
    unsigned id, profile;
    struct placement placement;
};

struct compute_instance {
    void *device, *gpu_instance;
    unsigned id, profile;
    struct placement placement;
};

struct gpu_profile {
    unsigned id, p2p, slices, instances, multiprocessors, copy_engines, decoders, encoders, jpeg, ofa;
    unsigned long long memory_mib;
};

struct compute_profile {
    unsigned id, slices, instances, multiprocessors, copy_engines, decoders, encoders, jpeg, ofa;
};

/* Handles of MIG devices are addresses in this array. Its GPU and compute instances have the same handle. */
static const char handles[FAKE_DEVICES][INSTANCES];

bool fake_mig_mode(void) {
    const char *value = getenv("FAKE_NVML_MIG_MODE");
    return value != NULL && strcmp(value, "1") == 0;
}

bool fake_mig_instance(const void *handle, int *device, unsigned *instance) {
    size_t place = (size_t)((const char *)handle - &handles[0][0]);
    if (handle == NULL || !fake_mig_mode() || place >= sizeof handles)
        return false;
    *device = (int)(place / INSTANCES), *instance = (unsigned)(place % INSTANCES);
    return true;
}

void *fake_mig_handle(int device, unsigned instance) {
    bool there = fake_mig_mode() && device >= 0 && device < FAKE_DEVICES && instance < INSTANCES;
    return there ? (void *)&handles[device][instance] : NULL;
}

EXPORT int nvmlDeviceIsMigDeviceHandle(void *handle, unsigned *out) {
    int device;
    unsigned instance;
    *out = fake_mig_instance(handle, &device, &instance);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) {
    *count = fake_mig_mode() ? INSTANCES : 0;
    return fake_nvml_device(handle) < 0 ? NVML_INVALID_ARGUMENT : NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **out) {
    int device = fake_nvml_device(handle);
    *out = fake_mig_handle(device, index);
    return *out == NULL ? NVML_INVALID_ARGUMENT : NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *handle, void **out) {
    int device;
    unsigned instance;
    if (!fake_mig_instance(handle, &device, &instance))
        return NVML_INVALID_ARGUMENT;
    *out = (void *)fake_state_device(device);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetGpuInstanceId(void *handle, unsigned *out) {
    int device;
    unsigned instance;
    if (!fake_mig_instance(handle, &device, &instance))
        return NVML_INVALID_ARGUMENT;
    *out = FIRST_ID + instance;
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetComputeInstanceId(void *handle, unsigned *out) {
    int device;
    unsigned instance;
    *out = 0;
    return fake_mig_instance(handle, &device, &instance) ? NVML_SUCCESS : NVML_INVALID_ARGUMENT;
}

EXPORT int nvmlDeviceGetAttributes_v2(void *handle, struct attributes *out) {
    int device;
    unsigned instance;
    *out = (struct attributes){.multiprocessors = 14, .gpu_slices = 1, .compute_slices = 1, .memory_mib = SLICE_MIB};
    return fake_mig_instance(handle, &device, &instance) ? NVML_SUCCESS : NVML_INVALID_ARGUMENT;
}

EXPORT int nvmlDeviceGetGpuInstanceById(void *handle, unsigned id, void **out) {
    return nvmlDeviceGetMigDeviceHandleByIndex(handle, id - FIRST_ID, out);
}

EXPORT int nvmlGpuInstanceGetComputeInstanceById(void *gpu_instance, unsigned id, void **out) {
    *out = gpu_instance;
    return id == 0 ? NVML_SUCCESS : NVML_NOT_FOUND;
}

EXPORT int nvmlGpuInstanceGetInfo(void *gpu_instance, struct gpu_instance *out) {
    *out = (struct gpu_instance){.profile = PROFILE};
    (void)nvmlDeviceGetDeviceHandleFromMigDeviceHandle(gpu_instance, &out->device);
    return nvmlDeviceGetGpuInstanceId(gpu_instance, &out->id);
}

EXPORT int nvmlComputeInstanceGetInfo_v2(void *instance, struct compute_instance *out) {
    *out = (struct compute_instance){.gpu_instance = instance, .profile = PROFILE};
    return nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance, &out->device);
}

EXPORT int nvmlDeviceGetGpuInstanceProfileInfo(void *handle, unsigned profile, struct gpu_profile *out) {
    if (fake_nvml_device(handle) < 0 || profile != PROFILE)
        return NVML_NOT_SUPPORTED;
    *out = (struct gpu_profile){.id = PROFILE, .slices = 1, .instances = INSTANCES, .memory_mib = SLICE_MIB};
    return NVML_SUCCESS;
}

EXPORT int nvmlGpuInstanceGetComputeInstanceProfileInfo(void *gpu_instance, unsigned profile, unsigned engine,
                                                        struct compute_profile *out) {
    (void)gpu_instance;
    if (profile != PROFILE || engine != 0)
        return NVML_NOT_SUPPORTED;
    *out = (struct compute_profile){.id = PROFILE, .slices = 1, .instances = 1};
    return NVML_SUCCESS;
}
