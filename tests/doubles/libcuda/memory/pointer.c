/* Attributes of addresses: cuPointerGetAttribute and similar calls. */
#include <string.h>

#include "memory/ranges.h"

static CUresult attribute_of(const struct range *range, CUpointer_attribute attribute, CUdeviceptr address,
                             void *value) {
    bool host = range->kind == RANGE_HOST;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)value = (CUcontext)range->context; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)value = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = address; break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (!host && range->kind != RANGE_MANAGED)
            return CUDA_ERROR_INVALID_VALUE;
        *(void **)value = (void *)(uintptr_t)address;
        break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)value = range->id; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)value = range->kind == RANGE_MANAGED; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = fake_ordinal_of(range->device); break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(int *)value = range->kind == RANGE_LINEAR; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)value = range->address; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)value = range->asked; break;
    case CU_POINTER_ATTRIBUTE_MAPPED: *(int *)value = 1; break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        *(CUmemoryPool *)value = range->kind == RANGE_POOL ? (CUmemoryPool)range->object : NULL;
        break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    const struct range *range = fake_range_holding(address);
    result = range == NULL || value == NULL ? CUDA_ERROR_INVALID_VALUE : attribute_of(range, attribute, address, value);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

/* Unlike in cuPointerGetAttribute, an unknown address is no error here: its attributes are 0. */
EXPORT CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **values,
                                       CUdeviceptr address) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    if (attributes == NULL || values == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++) {
        if (values[i] == NULL)
            return CUDA_ERROR_INVALID_VALUE;
        result = cuPointerGetAttribute(values[i], attributes[i], address);
        if (result == CUDA_ERROR_INVALID_VALUE)
            *(int *)values[i] = attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL ? CU_DEVICE_INVALID : 0;
        else if (result != CUDA_SUCCESS)
            return result;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    if (value == NULL || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS || fake_range_holding(address) == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&fake_lock);
    return result;
}
