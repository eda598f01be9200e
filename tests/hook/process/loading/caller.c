/* A library through which a program uses CUDA, and which the program closes again. libcuda is loaded because this
 * library needs it. Kernels of the library still run when it is closed. */
#include <stddef.h>

typedef void *handle;

int cuInit(unsigned flags);
int cuDeviceGet(int *device, int ordinal);
int cuDevicePrimaryCtxRetain(handle *context, int device);
int cuCtxSetCurrent(handle context);
int cuModuleLoadData(handle *module, const void *image);
int cuModuleGetFunction(handle *function, handle module, const char *name);
int cuStreamCreate(handle *stream, unsigned flags);
int cuStreamSynchronize(handle stream);
int cuLaunchKernel(handle function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared,
                   handle stream, void **parameters, void **extra);
int cuLaunchHostFunc(handle stream, void (*function)(void *), void *argument);
int cuMemAllocAsync(unsigned long long *memory, size_t bytes, handle stream);
int cuMemFreeAsync(unsigned long long memory, handle stream);
int cuStreamAddCallback(handle stream, void (*function)(handle, int, void *), void *argument, unsigned flags);

static int called;

static void call(void *unused) {
    (void)unused;
    called++;
}

static void call_back(handle stream, int status, void *unused) {
    (void)stream, (void)status;
    call(unused);
}

/* Launch into a stream of its own, and once in each way that passes a function of this library to the driver. Work that
 * uses these functions has ended when this returns; the last kernels have not. Return the number of calls of the
 * functions; negative: an error. */
int work(int kernels) {
    handle context, module, function, stream;
    unsigned long long memory;
    int device, error;
    called = 0;
    if ((error = cuInit(0)) || (error = cuDeviceGet(&device, 0)) ||
        (error = cuDevicePrimaryCtxRetain(&context, device)) || (error = cuCtxSetCurrent(context)) ||
        (error = cuModuleLoadData(&module, "")) || (error = cuModuleGetFunction(&function, module, "spin_us_5000")) ||
        (error = cuStreamCreate(&stream, 1)) || (error = cuLaunchHostFunc(stream, call, NULL)) ||
        (error = cuStreamAddCallback(stream, call_back, NULL, 0)) ||
        (error = cuMemAllocAsync(&memory, 1 << 20, stream)) || (error = cuMemFreeAsync(memory, stream)) ||
        (error = cuStreamSynchronize(stream)))
        return -error;
    for (int i = 0; i < kernels; i++)
        if ((error = cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL)))
            return -error;
    return called;
}
