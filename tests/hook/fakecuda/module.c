/* Modules and functions of the double. A function's name is its behaviour:
 *
 *     spin_us_N   occupies the device for N microseconds
 *     spin_arg    for as many nanoseconds as its first argument (uint64_t) says
 *     hang        until the state file's release flag is set or the process ends; other processes go on beside it
 *     noop        no time at all
 */
#include <stdlib.h>
#include <string.h>

#include "module.h"

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

CUresult fake_kernel_work(CUfunction handle, void *const *arguments, struct work *work) {
    const struct function *function = (const struct function *)handle;
    if (!fake_is(function, MAGIC_FUNCTION))
        return CUDA_ERROR_INVALID_HANDLE;
    if (function->argument && (arguments == NULL || arguments[0] == NULL))
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t duration = function->argument ? *(const uint64_t *)arguments[0] : function->duration;
    *work = (struct work){.type = CU_GRAPH_NODE_TYPE_KERNEL, .hang = function->hang, .device_ns = duration};
    return CUDA_SUCCESS;
}
