/* The forms of CUDA 3.1 and earlier, with addresses and sizes of 32 bits: they use memory below 4 GiB and call the
 * present forms. */
#include "memory/array.h"
#include "memory/memory.h"

/* Convert a size to the 32 bits of the old form. */
static unsigned int low(size_t bytes) {
    return bytes > UINT32_MAX ? UINT32_MAX : (unsigned int)bytes;
}

EXPORT CUresult cuMemAlloc(CUdeviceptr_v1 *out, unsigned int bytes) {
    struct context *context;
    CUresult result = fake_enter(&context);
    uint64_t rounded = fake_round(bytes, GRANULARITY);
    if (result == CUDA_SUCCESS && (bytes == 0 || out == NULL))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    result = fake_unsafe_call();
    if (result == CUDA_SUCCESS && !fake_state_take(context->device, FAKE_LINEAR, rounded))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS) {
        struct range range = {
            .bytes = rounded, .asked = bytes, .kind = RANGE_LINEAR, .device = context->device, .context = context};
        const struct range *kept = fake_range_add_low(range);
        if (kept != NULL) {
            *out = (CUdeviceptr_v1)kept->address;
        } else {
            fake_state_give(context->device, FAKE_LINEAR, rounded);
            result = CUDA_ERROR_OUT_OF_MEMORY; /* all addresses below 4 GiB are used up, because none is used twice */
        }
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuMemAllocPitch(CUdeviceptr_v1 *out, unsigned int *pitch, unsigned int width, unsigned int height,
                                unsigned int element) {
    uint64_t row = fake_round(width, GRANULARITY);
    if (pitch == NULL || (element != 4 && element != 8 && element != 16))
        return CUDA_ERROR_INVALID_VALUE;
    if (row > UINT32_MAX || row * height > UINT32_MAX)
        return fake_initialized() == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = cuMemAlloc(out, (unsigned int)(row * height));
    if (result == CUDA_SUCCESS)
        *pitch = (unsigned int)row;
    return result;
}

EXPORT CUresult cuMemFree(CUdeviceptr_v1 address) {
    return cuMemFree_v2(address);
}

EXPORT CUresult cuMemGetInfo(unsigned int *free_bytes, unsigned int *total) {
    size_t free_now = 0, all = 0;
    CUresult result = cuMemGetInfo_v2(&free_now, &all);
    if (result == CUDA_SUCCESS && free_bytes != NULL)
        *free_bytes = low(free_now);
    if (result == CUDA_SUCCESS && total != NULL)
        *total = low(all);
    return result;
}

EXPORT CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice device) {
    size_t all = 0;
    CUresult result = cuDeviceTotalMem_v2(bytes != NULL ? &all : NULL, device);
    if (result == CUDA_SUCCESS)
        *bytes = low(all);
    return result;
}

EXPORT CUresult cuMemGetAddressRange(CUdeviceptr_v1 *base, unsigned int *size, CUdeviceptr_v1 address) {
    CUdeviceptr start = 0;
    size_t bytes = 0;
    CUresult result = cuMemGetAddressRange_v2(&start, &bytes, address);
    if (result == CUDA_SUCCESS && base != NULL)
        *base = (CUdeviceptr_v1)start;
    if (result == CUDA_SUCCESS && size != NULL)
        *size = low(bytes);
    return result;
}

EXPORT CUresult cuArrayCreate(CUarray *out, const CUDA_ARRAY_DESCRIPTOR_v1 *shape) {
    if (shape == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    return cuArrayCreate_v2(out, &(CUDA_ARRAY_DESCRIPTOR){.Width = shape->Width,
                                                          .Height = shape->Height,
                                                          .Format = shape->Format,
                                                          .NumChannels = shape->NumChannels});
}

EXPORT CUresult cuArray3DCreate(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR_v1 *shape) {
    if (shape == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    return cuArray3DCreate_v2(out, &(CUDA_ARRAY3D_DESCRIPTOR){.Width = shape->Width,
                                                              .Height = shape->Height,
                                                              .Depth = shape->Depth,
                                                              .Format = shape->Format,
                                                              .NumChannels = shape->NumChannels,
                                                              .Flags = shape->Flags});
}

EXPORT CUresult cuModuleGetGlobal(CUdeviceptr_v1 *out, unsigned int *bytes, CUmodule module, const char *name) {
    CUdeviceptr address = 0;
    size_t size = 0;
    CUresult result = cuModuleGetGlobal_v2(&address, &size, module, name);
    if (result == CUDA_SUCCESS && out != NULL)
        *out = (CUdeviceptr_v1)address;
    if (result == CUDA_SUCCESS && bytes != NULL)
        *bytes = low(size);
    return result;
}

EXPORT CUresult cuCtxCreate(CUcontext *out, unsigned int flags, CUdevice device) {
    return cuCtxCreate_v2(out, flags, device);
}

EXPORT CUresult cuGLCtxCreate_v2(CUcontext *out, unsigned int flags, CUdevice device) {
    return cuCtxCreate_v2(out, flags, device);
}

EXPORT CUresult cuGLCtxCreate(CUcontext *out, unsigned int flags, CUdevice device) {
    return cuCtxCreate_v2(out, flags, device);
}

EXPORT CUresult cuVDPAUCtxCreate_v2(CUcontext *out, unsigned int flags, CUdevice device, unsigned int vdpau_device,
                                    void *functions) {
    (void)vdpau_device, (void)functions;
    return cuCtxCreate_v2(out, flags, device);
}

EXPORT CUresult cuVDPAUCtxCreate(CUcontext *out, unsigned int flags, CUdevice device, unsigned int vdpau_device,
                                 void *functions) {
    return cuVDPAUCtxCreate_v2(out, flags, device, vdpau_device, functions);
}

EXPORT CUresult cuCtxCreate_v3(CUcontext *out, CUexecAffinityParam *parameters, int count, unsigned int flags,
                               CUdevice device) {
    (void)parameters, (void)count;
    return cuCtxCreate_v2(out, flags, device);
}

EXPORT CUresult cuCtxDestroy(CUcontext context) {
    return cuCtxDestroy_v2(context);
}

EXPORT CUresult cuStreamDestroy(CUstream stream) {
    return cuStreamDestroy_v2(stream);
}

EXPORT CUresult cuDevicePrimaryCtxReset(CUdevice device) {
    return cuDevicePrimaryCtxReset_v2(device);
}

EXPORT CUresult cuMemsetD8(CUdeviceptr_v1 to, unsigned char value, unsigned int n) {
    return cuMemsetD8_v2(to, value, n);
}

EXPORT CUresult cuMemsetD16(CUdeviceptr_v1 to, unsigned short value, unsigned int n) {
    return cuMemsetD16_v2(to, value, n);
}

EXPORT CUresult cuMemsetD32(CUdeviceptr_v1 to, unsigned int value, unsigned int n) {
    return cuMemsetD32_v2(to, value, n);
}

EXPORT CUresult cuMemcpyDtoD(CUdeviceptr_v1 to, CUdeviceptr_v1 from, unsigned int n) {
    return cuMemcpyDtoD_v2(to, from, n);
}

EXPORT CUresult cuMemcpyHtoD(CUdeviceptr_v1 to, const void *from, unsigned int n) {
    return cuMemcpyHtoD_v2(to, from, n);
}

EXPORT CUresult cuMemcpyDtoH(void *to, CUdeviceptr_v1 from, unsigned int n) {
    return cuMemcpyDtoH_v2(to, from, n);
}
