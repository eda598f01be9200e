/* cuGetProcAddress of the double: every name it exports, by the version of CUDA in which that form appeared. */
#include <string.h>

#include "fake.h"

struct symbol {
    const char *name;
    int since;
    void *legacy, *per_thread; /* per_thread NULL: the name has no such form */
};

/* Prototypes that cuda.h has no more: here only their addresses are needed. */
extern CUresult cuLaunch(CUfunction), cuLaunchGrid(CUfunction, int, int),
    cuLaunchGridAsync(CUfunction, int, int, CUstream);
EXPORT CUresult cuGetProcAddress(const char *name, void **out, int version, cuuint64_t flags);
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **out, int version, cuuint64_t flags,
                                    CUdriverProcAddressQueryResult *status);

#define PLAIN(name, since) {#name, since, (void *)name, NULL}
#define FORM(name, symbol, since) {#name, since, (void *)symbol, NULL}
#define STREAM(name, symbol, suffix, since) {#name, since, (void *)symbol, (void *)symbol##suffix}

/* Newer forms of a name stand before older ones. */
static const struct symbol symbols[] = {
    PLAIN(cuInit, 2000),
    PLAIN(cuDriverGetVersion, 2020),
    PLAIN(cuGetErrorName, 6000),
    PLAIN(cuGetErrorString, 6000),
    FORM(cuGetProcAddress, cuGetProcAddress_v2, 12000),
    PLAIN(cuGetProcAddress, 11030),
    PLAIN(cuDeviceGet, 2000),
    PLAIN(cuDeviceGetCount, 2000),
    PLAIN(cuDeviceGetName, 2000),
    PLAIN(cuDeviceGetAttribute, 2000),
    FORM(cuDeviceGetUuid, cuDeviceGetUuid_v2, 11040),
    PLAIN(cuDeviceGetUuid, 9020),
    FORM(cuDeviceTotalMem, cuDeviceTotalMem_v2, 3020),
    PLAIN(cuDevicePrimaryCtxRetain, 7000),
    PLAIN(cuDevicePrimaryCtxGetState, 7000),
    FORM(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, 11000),
    FORM(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2, 11000),
    FORM(cuDevicePrimaryCtxSetFlags, cuDevicePrimaryCtxSetFlags_v2, 11000),
    FORM(cuCtxCreate, cuCtxCreate_v4, 12050),
    FORM(cuCtxCreate, cuCtxCreate_v2, 3020),
    FORM(cuCtxDestroy, cuCtxDestroy_v2, 4000),
    FORM(cuCtxPushCurrent, cuCtxPushCurrent_v2, 4000),
    FORM(cuCtxPopCurrent, cuCtxPopCurrent_v2, 4000),
    PLAIN(cuCtxAttach, 2000),
    PLAIN(cuCtxDetach, 2000),
    PLAIN(cuCtxSetCurrent, 4000),
    PLAIN(cuCtxGetCurrent, 4000),
    PLAIN(cuCtxGetDevice, 2000),
    PLAIN(cuCtxGetApiVersion, 3020),
    PLAIN(cuCtxSynchronize, 2000),
    PLAIN(cuStreamCreate, 2000),
    PLAIN(cuStreamCreateWithPriority, 5050),
    FORM(cuStreamDestroy, cuStreamDestroy_v2, 4000),
    STREAM(cuStreamSynchronize, cuStreamSynchronize, _ptsz, 7000),
    STREAM(cuStreamQuery, cuStreamQuery, _ptsz, 7000),
    STREAM(cuStreamGetCtx, cuStreamGetCtx, _ptsz, 9020),
    STREAM(cuStreamWaitEvent, cuStreamWaitEvent, _ptsz, 7000),
    STREAM(cuStreamBeginCapture, cuStreamBeginCapture_v2, _ptsz, 10010),
    STREAM(cuStreamEndCapture, cuStreamEndCapture, _ptsz, 10000),
    STREAM(cuStreamIsCapturing, cuStreamIsCapturing, _ptsz, 10000),
    STREAM(cuStreamGetCaptureInfo, cuStreamGetCaptureInfo, _ptsz, 10010),
    PLAIN(cuThreadExchangeStreamCaptureMode, 10010),
    PLAIN(cuEventCreate, 2000),
    FORM(cuEventDestroy, cuEventDestroy_v2, 4000),
    PLAIN(cuEventQuery, 2000),
    PLAIN(cuEventSynchronize, 2000),
    STREAM(cuEventRecord, cuEventRecord, _ptsz, 7000),
    STREAM(cuEventRecordWithFlags, cuEventRecordWithFlags, _ptsz, 11010),
    FORM(cuEventElapsedTime, cuEventElapsedTime_v2, 12080),
    PLAIN(cuEventElapsedTime, 2000),
#if FAKE_CUDA_VERSION >= 12050
    PLAIN(cuCtxRecordEvent, 12050),
#endif
    PLAIN(cuModuleLoadData, 2000),
    PLAIN(cuModuleUnload, 2000),
    PLAIN(cuModuleGetFunction, 2000),
    STREAM(cuLaunchKernel, cuLaunchKernel, _ptsz, 7000),
    STREAM(cuLaunchKernelEx, cuLaunchKernelEx, _ptsz, 11060),
    STREAM(cuLaunchCooperativeKernel, cuLaunchCooperativeKernel, _ptsz, 9000),
    PLAIN(cuLaunch, 2000),
    PLAIN(cuLaunchGrid, 2000),
    PLAIN(cuLaunchGridAsync, 2000),
    PLAIN(cuGraphCreate, 10000),
    PLAIN(cuGraphDestroy, 10000),
    PLAIN(cuGraphExecDestroy, 10000),
    FORM(cuGraphInstantiate, cuGraphInstantiateWithFlags, 12000),
    FORM(cuGraphInstantiate, cuGraphInstantiate_v2, 11000),
    PLAIN(cuGraphInstantiateWithFlags, 11040),
    STREAM(cuGraphLaunch, cuGraphLaunch, _ptsz, 10000),
    FORM(cuMemAlloc, cuMemAlloc_v2, 3020),
    PLAIN(cuMemAllocManaged, 6000),
    FORM(cuMemAllocPitch, cuMemAllocPitch_v2, 3020),
    FORM(cuMemFree, cuMemFree_v2, 3020),
    FORM(cuMemGetInfo, cuMemGetInfo_v2, 3020),
    FORM(cuMemAllocHost, cuMemAllocHost_v2, 3020),
    PLAIN(cuMemFreeHost, 2000),
    STREAM(cuMemcpyHtoD, cuMemcpyHtoD_v2, _ptds, 7000),
    STREAM(cuMemcpyDtoH, cuMemcpyDtoH_v2, _ptds, 7000),
    STREAM(cuMemcpyDtoD, cuMemcpyDtoD_v2, _ptds, 7000),
    STREAM(cuMemsetD8, cuMemsetD8_v2, _ptds, 7000),
    STREAM(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, _ptsz, 7000),
    STREAM(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, _ptsz, 7000),
    STREAM(cuMemsetD8Async, cuMemsetD8Async, _ptsz, 7000),
};

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **out, int version, cuuint64_t flags,
                                    CUdriverProcAddressQueryResult *status) {
    CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    *out = NULL;
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        if (strcmp(symbols[i].name, name) != 0)
            continue;
        found = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
        if (symbols[i].since > version || symbols[i].since > FAKE_CUDA_VERSION)
            continue;
        bool per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) && symbols[i].per_thread != NULL;
        *out = per_thread ? symbols[i].per_thread : symbols[i].legacy;
        found = CU_GET_PROC_ADDRESS_SUCCESS;
        break;
    }
    if (status != NULL)
        *status = found;
    return found == CU_GET_PROC_ADDRESS_SUCCESS || status != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuGetProcAddress(const char *name, void **out, int version, cuuint64_t flags) {
    return cuGetProcAddress_v2(name, out, version, flags, NULL);
}
