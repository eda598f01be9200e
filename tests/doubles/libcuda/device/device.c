/* The devices of the double, and the names of its errors. */
#include <stdio.h>
#include <string.h>

#include "device/attributes.h"
#include "device/limits.h"
#include "device/names.h"

EXPORT CUresult cuDriverGetVersion(int *version) {
    if (version == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *version = FAKE_CUDA_VERSION;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count) {
    if (count == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (fake_initialized() != CUDA_SUCCESS)
        return CUDA_ERROR_NOT_INITIALIZED;
    for (*count = 0; fake_state_visible(*count) >= 0; ++*count)
        ;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (device == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (fake_initialized() != CUDA_SUCCESS)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (fake_state_visible(ordinal) < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult fake_find_device(CUdevice ordinal, int *device) {
    if (fake_initialized() != CUDA_SUCCESS)
        return CUDA_ERROR_NOT_INITIALIZED;
    *device = fake_state_visible(ordinal);
    return *device < 0 ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice ordinal) {
    int device;
    CUresult result = fake_find_device(ordinal, &device);
    if (result == CUDA_SUCCESS)
        snprintf(name, (size_t)length, "%s", fake_state_device(device)->model);
    return result;
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice ordinal) {
    if (uuid == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    int device;
    CUresult result = fake_find_device(ordinal, &device);
    if (result == CUDA_SUCCESS)
        memcpy(uuid->bytes, fake_state_device(device)->uuid, sizeof uuid->bytes);
    return result;
}

EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice ordinal) {
    if (uuid == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    return cuDeviceGetUuid_v2(uuid, ordinal);
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice ordinal) {
    int device;
    CUresult result = fake_find_device(ordinal, &device);
    if (result == CUDA_SUCCESS && bytes == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *bytes = fake_state_device(device)->memory;
    return result;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice ordinal) {
    int device;
    CUresult result = fake_find_device(ordinal, &device);
    if (result != CUDA_SUCCESS)
        return result;
    return value != NULL && fake_attribute(attribute, value) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

int fake_ordinal_of(int device) {
    int ordinal = 0;
    while (fake_state_visible(ordinal) >= 0 && fake_state_visible(ordinal) != device)
        ordinal++;
    return ordinal;
}

EXPORT CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice ordinal) {
    int device;
    CUresult result = fake_find_device(ordinal, &device);
    if (result == CUDA_SUCCESS)
        snprintf(text, (size_t)length, "0000:%02X:00.0", device + 1);
    return result;
}

EXPORT CUresult cuDeviceGetByPCIBusId(CUdevice *out, const char *text) {
    if (text == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    int device;
    char own[24];
    if (fake_initialized() != CUDA_SUCCESS)
        return CUDA_ERROR_NOT_INITIALIZED;
    for (int ordinal = 0; fake_find_device(ordinal, &device) == CUDA_SUCCESS; ordinal++) {
        snprintf(own, sizeof own, "0000:%02X:00.0", device + 1);
        if (strcasecmp(own, text) == 0) {
            *out = ordinal;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_DEVICE;
}

EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice one, CUdevice other) {
    if (can == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    int device;
    CUresult result = fake_find_device(one, &device);
    if (result == CUDA_SUCCESS)
        result = fake_find_device(other, &device);
    if (result == CUDA_SUCCESS)
        *can = one != other;
    return result;
}

static const struct fake_error *find_error(CUresult error) {
    for (unsigned i = 0; i < fake_error_count; i++)
        if (fake_errors[i].value == (int)error)
            return &fake_errors[i];
    return NULL;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **name) {
    if (name == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    const struct fake_error *found = find_error(error);
    *name = found ? found->name : NULL;
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
    if (text == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    const struct fake_error *found = find_error(error);
    *text = found ? found->text : NULL;
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
