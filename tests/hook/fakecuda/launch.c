/* Modules, functions and launches of the double. A function's name is its behaviour:
 *
 *     spin_us_N   occupies the device for N microseconds
 *     spin_arg    for as many nanoseconds as its first argument (uint64_t) says
 *     hang        until the state file's release flag is set or the process ends; other processes go on beside it
 *     noop        no time at all
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake.h"

struct function {
    unsigned magic;
    bool hang, argument;
    uint64_t duration;
    struct function *next;
};

struct module {
    unsigned magic;
    struct function *functions;
};

EXPORT CUresult cuModuleLoadData(CUmodule *out, const void *image) {
    struct context *context;
    CUresult result = fake_enter(&context);
    (void)image;
    if (result != CUDA_SUCCESS)
        return result;
    struct module *module = calloc(1, sizeof *module);
    module->magic = MAGIC_MODULE;
    *out = (CUmodule)module;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleUnload(CUmodule handle) {
    struct module *module = (struct module *)handle;
    if (!fake_is(module, MAGIC_MODULE))
        return CUDA_ERROR_INVALID_HANDLE;
    for (struct function *function = module->functions, *next; function != NULL; function = next) {
        next = function->next;
        free(function);
    }
    free(module);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(CUfunction *out, CUmodule handle, const char *name) {
    struct module *module = (struct module *)handle;
    struct function function = {.magic = MAGIC_FUNCTION};
    if (!fake_is(module, MAGIC_MODULE))
        return CUDA_ERROR_INVALID_HANDLE;
    if (strncmp(name, "spin_us_", 8) == 0)
        function.duration = strtoull(name + 8, NULL, 10) * 1000;
    else if (strcmp(name, "spin_arg") == 0)
        function.argument = true;
    else if (strcmp(name, "hang") == 0)
        function.hang = true;
    else if (strcmp(name, "noop") != 0)
        return CUDA_ERROR_NOT_FOUND;
    struct function *kept = malloc(sizeof *kept);
    function.next = module->functions;
    *kept = function;
    module->functions = kept;
    *out = (CUfunction)kept;
    return CUDA_SUCCESS;
}

CUresult fake_submit_kernel(struct stream *stream, uint64_t duration, bool hang) {
    CUresult result = fake_capture_kernel(stream, duration, hang);
    if (result != CUDA_ERROR_NOT_READY)
        return result;
    result = fake_order_call(stream);
    if (result == CUDA_SUCCESS) {
        fake_state_usage(stream->context->device)->submitted++;
        fake_submit(stream, (struct op){.kind = hang ? OP_HANG : OP_KERNEL, .left = duration});
    }
    return result;
}

static CUresult launch(CUfunction handle, CUstream stream_handle, void **arguments, bool per_thread) {
    const struct function *function = (const struct function *)handle;
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    struct stream *stream = fake_stream(context, stream_handle, per_thread);
    if (stream == NULL || !fake_is(function, MAGIC_FUNCTION))
        return CUDA_ERROR_INVALID_HANDLE;
    if (function->argument && (arguments == NULL || arguments[0] == NULL))
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t duration = function->argument ? *(const uint64_t *)arguments[0] : function->duration;
    pthread_mutex_lock(&fake_lock);
    result = fake_submit_kernel(stream, duration, function->hang);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

#define UNUSED_SHAPE (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared

EXPORT CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                               unsigned bz, unsigned shared, CUstream stream, void **arguments, void **extra) {
    UNUSED_SHAPE, (void)extra;
    return launch(f, stream, arguments, false);
}

EXPORT CUresult cuLaunchKernel_ptsz(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                    unsigned bz, unsigned shared, CUstream stream, void **arguments, void **extra) {
    UNUSED_SHAPE, (void)extra;
    return launch(f, stream, arguments, true);
}

EXPORT CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                          unsigned bz, unsigned shared, CUstream stream, void **arguments) {
    UNUSED_SHAPE;
    return launch(f, stream, arguments, false);
}

EXPORT CUresult cuLaunchCooperativeKernel_ptsz(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                               unsigned by, unsigned bz, unsigned shared, CUstream stream,
                                               void **arguments) {
    UNUSED_SHAPE;
    return launch(f, stream, arguments, true);
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **arguments, void **extra) {
    (void)extra;
    return launch(f, config->hStream, arguments, false);
}

EXPORT CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction f, void **arguments, void **extra) {
    (void)extra;
    return launch(f, config->hStream, arguments, true);
}

/* The launches of CUDA 3, on the legacy stream. */
EXPORT CUresult cuLaunch(CUfunction f) {
    return launch(f, NULL, NULL, false);
}

EXPORT CUresult cuLaunchGrid(CUfunction f, int width, int height) {
    (void)width, (void)height;
    return launch(f, NULL, NULL, false);
}

EXPORT CUresult cuLaunchGridAsync(CUfunction f, int width, int height, CUstream stream) {
    (void)width, (void)height;
    return launch(f, stream, NULL, false);
}
