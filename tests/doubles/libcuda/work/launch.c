/* Launches of the double: kernels in every form of the call, and the submission of work of any kind to a stream. */
#include "work/graph.h"
#include "work/module.h"

void fake_put_work(struct stream *stream, const struct work *work) {
    struct fake_usage *usage = fake_state_usage(stream->context->device);
    if (work->function != NULL) {
        fake_submit(stream, (struct op){.kind = OP_HOST, .call = work->function, .argument = work->argument});
    } else if (work->copy_ns > 0) {
        usage->copies++;
        fake_submit(stream, (struct op){.kind = OP_COPY, .left = work->copy_ns});
    } else {
        usage->submitted++;
        fake_submit(stream, (struct op){.kind = work->hang ? OP_HANG : OP_KERNEL,
                                        .left = work->device_ns,
                                        .faults = work->faults,
                                        .meeting = work->meeting,
                                        .met_at = work->met_at});
    }
}

CUresult fake_submit_work(struct stream *stream, const struct work *work) {
    if (stream->capture != NULL) {
        struct node node = {.work = *work};
        return fake_capture_node(stream, &node);
    }
    CUresult result = fake_order_call(stream);
    if (result == CUDA_SUCCESS)
        fake_put_work(stream, work);
    return result;
}

static CUresult launch(CUfunction function, CUstream handle, void **arguments) {
    struct stream *stream;
    struct work work;
    CUresult result = fake_enter_stream(handle, &stream);
    if (result == CUDA_SUCCESS)
        result = fake_kernel_work(function, arguments, &work);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    result = fake_submit_work(stream, &work);
    pthread_mutex_unlock(&fake_lock);
    fake_moment(MOMENT_LAUNCHED);
    return result;
}

EXPORT CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                               unsigned bz, unsigned shared, CUstream stream, void **arguments, void **extra) {
    (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)extra;
    return launch(f, stream, arguments);
}

EXPORT CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                          unsigned bz, unsigned shared, CUstream stream, void **arguments) {
    (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared;
    return launch(f, stream, arguments);
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **arguments, void **extra) {
    (void)extra;
    return config == NULL ? CUDA_ERROR_INVALID_VALUE : launch(f, config->hStream, arguments);
}

/* One launch per device, each in a stream of its own context. */
EXPORT CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *launches, unsigned int count,
                                                     unsigned int flags) {
    CUresult result = fake_initialized();
    (void)flags;
    if (result == CUDA_SUCCESS && (launches == NULL || count == 0))
        result = CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; result == CUDA_SUCCESS && i < count; i++) {
        struct stream *stream = (struct stream *)launches[i].hStream;
        if (!fake_is(stream, MAGIC_STREAM)) /* default streams are not allowed here */
            return CUDA_ERROR_INVALID_HANDLE;
        result = launch(launches[i].function, launches[i].hStream, launches[i].kernelParams);
    }
    return result;
}

/* Launch calls of CUDA 3. */
EXPORT CUresult cuLaunch(CUfunction f) {
    return launch(f, NULL, NULL);
}

EXPORT CUresult cuLaunchGrid(CUfunction f, int width, int height) {
    (void)width, (void)height;
    return launch(f, NULL, NULL);
}

EXPORT CUresult cuLaunchGridAsync(CUfunction f, int width, int height, CUstream stream) {
    (void)width, (void)height;
    return launch(f, stream, NULL);
}
