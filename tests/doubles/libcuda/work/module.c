/* Modules, libraries and functions of the double.
 *
 * An image of a module that begins with "fakecuda " lists the device memory of its code and variables: `fakecuda
 * code=BYTES NAME=BYTES ...`. Any other image takes none. Variables are taken when the module is loaded. Code is taken
 * when the first function is looked up (with CUDA_MODULE_LOADING=EAGER, when the module is loaded). A library is loaded
 * into a context when the program first queries one of its functions or variables there. The memory is freed when the
 * module, the library or the context ends.
 *
 * The name of a function determines its behaviour:
 *
 * - spin_us_N: occupies the device for N microseconds.
 * - spin_arg: occupies the device for as many nanoseconds as its first argument (uint64_t).
 * - load_us_N: its first launch takes N microseconds in the call, like a kernel whose code is loaded at that moment.
 *   Each launch occupies the device for N microseconds.
 * - meet: a collective. It adds 1 to the number to which its first argument (uint64_t *) points, in host memory that
 *   the ranks share. It occupies the device until that number is at least its second argument (uint64_t).
 * - hang: runs until the state file's release flag is set or the process ends. Other processes run at the same time.
 * - noop: takes no time.
 * - Any other name: occupies the device for OTHER_US microseconds, like a kernel of a real program.
 */
#include "work/module.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "memory/memory.h"

enum { VARIABLES = 16, NAME_BYTES = 128, IMAGE_BYTES = 1024, OTHER_US = 10 };

struct image {
    uint64_t code;
    unsigned count;
    struct {
        char name[NAME_BYTES];
        uint64_t bytes;
    } variables[VARIABLES];
};

struct function {
    unsigned magic;
    bool hang, argument, meets, faults;
    int shared_bytes, carveout; /* attributes that the program has set */
    uint64_t duration;
    _Atomic uint64_t loading; /* ns for which the call of its first launch takes */
    struct library *library;  /* library of a kernel, which has no context */
    char name[NAME_BYTES];
    struct function *next;
};

struct module {
    unsigned magic;
    struct context *context;
    struct library *library; /* library of which this is an instance */
    struct image image;
    uint64_t code; /* bytes of code taken on the device */
    struct range *variables[VARIABLES];
    struct function *functions;
    struct module *next;
};

struct library {
    unsigned magic;
    struct image image;
    struct function *kernels;
};

static struct module *modules;

static bool eager(void) {
    const char *mode = getenv("CUDA_MODULE_LOADING");
    return mode != NULL && strcmp(mode, "EAGER") == 0;
}

static struct image read_image(const void *content) {
    static const char mark[] = "fakecuda ";
    struct image image = {0};
    if (content == NULL || strncmp(content, mark, sizeof mark - 1) != 0)
        return image;
    char *copy = strdup((const char *)content + sizeof mark - 1), *rest = copy;
    for (char *item = strsep(&rest, " \n"); item != NULL && image.count < VARIABLES; item = strsep(&rest, " \n")) {
        char *value = strchr(item, '=');
        if (value == NULL)
            continue;
        *value++ = '\0';
        uint64_t bytes = strtoull(value, NULL, 10);
        if (strcmp(item, "code") == 0) {
            image.code = bytes;
        } else {
            snprintf(image.variables[image.count].name, NAME_BYTES, "%s", item);
            image.variables[image.count++].bytes = bytes;
        }
    }
    free(copy);
    return image;
}

static bool read_file(const char *path, char *content) {
    FILE *file = path == NULL ? NULL : fopen(path, "r");
    if (file == NULL)
        return false;
    content[fread(content, 1, IMAGE_BYTES - 1, file)] = '\0';
    fclose(file);
    return true;
}

/* Free the module's memory and remove the module. With fake_lock. */
static void end(struct module *module) {
    for (unsigned i = 0; i < module->image.count; i++)
        if (module->variables[i] != NULL)
            fake_memory_return(module->variables[i]);
    fake_state_give(module->context->device, FAKE_MODULE, module->code);
    for (struct function *function = module->functions, *next; function != NULL; function = next) {
        next = function->next;
        function->magic = 0;
        free(function);
    }
    for (struct module **at = &modules; *at != NULL; at = &(*at)->next)
        if (*at == module) {
            *at = module->next;
            break;
        }
    module->magic = 0;
    free(module);
}

void fake_modules_of_context_gone(struct context *context) {
    for (struct module *module = modules, *next; module != NULL; module = next) {
        next = module->next;
        if (module->context == context)
            end(module);
    }
}

static CUresult take_code(struct module *module) {
    uint64_t bytes = fake_round(module->image.code, GRANULARITY);
    if (module->code > 0 || bytes == 0)
        return CUDA_SUCCESS;
    if (!fake_state_take(module->context->device, FAKE_MODULE, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    module->code = bytes;
    return CUDA_SUCCESS;
}

static CUresult load(struct module **out, struct context *context, struct library *library, const struct image *image) {
    struct module *module = calloc(1, sizeof *module);
    CUresult result = CUDA_SUCCESS;
    *module = (struct module){
        .magic = MAGIC_MODULE, .context = context, .library = library, .image = *image, .next = modules};
    modules = module;
    for (unsigned i = 0; i < image->count && result == CUDA_SUCCESS; i++)
        result = fake_memory_take(context, FAKE_MODULE, RANGE_GLOBAL, image->variables[i].bytes, &module->variables[i]);
    if (result == CUDA_SUCCESS && eager())
        result = take_code(module);
    if (result == CUDA_SUCCESS)
        *out = module;
    else
        end(module);
    return result;
}

/* Get the library's module in a context, loaded if necessary. With fake_lock. */
static CUresult instance(struct module **out, struct library *library, struct context *context) {
    for (struct module *module = modules; module != NULL; module = module->next)
        if (module->library == library && module->context == context) {
            *out = module;
            return CUDA_SUCCESS;
        }
    return load(out, context, library, &library->image);
}

EXPORT CUresult cuModuleLoadData(CUmodule *out, const void *content) {
    struct context *context;
    struct image image = read_image(content);
    CUresult result = fake_enter(&context);
    if (result == CUDA_SUCCESS && out == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    result = load((struct module **)out, context, NULL, &image);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuModuleLoadDataEx(CUmodule *out, const void *content, unsigned int count, CUjit_option *options,
                                   void **values) {
    (void)count, (void)options, (void)values;
    return cuModuleLoadData(out, content);
}

EXPORT CUresult cuModuleLoadFatBinary(CUmodule *out, const void *content) {
    return cuModuleLoadData(out, content);
}

EXPORT CUresult cuModuleLoad(CUmodule *out, const char *path) {
    char content[IMAGE_BYTES];
    return read_file(path, content) ? cuModuleLoadData(out, content) : CUDA_ERROR_FILE_NOT_FOUND;
}

EXPORT CUresult cuModuleUnload(CUmodule handle) {
    struct module *module = (struct module *)handle;
    if (!fake_is(module, MAGIC_MODULE) || module->library != NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&fake_lock);
    end(module);
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode *mode) {
    if (mode == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *mode = eager() ? CU_MODULE_EAGER_LOADING : CU_MODULE_LAZY_LOADING;
    return CUDA_SUCCESS;
}

static CUresult variable_of(const struct module *module, CUdeviceptr *out, size_t *bytes, const char *name) {
    for (unsigned i = 0; name != NULL && i < module->image.count; i++)
        if (strcmp(module->image.variables[i].name, name) == 0) {
            if (out != NULL)
                *out = module->variables[i]->address;
            if (bytes != NULL)
                *bytes = module->variables[i]->asked;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr *out, size_t *bytes, CUmodule handle, const char *name) {
    if (!fake_is(handle, MAGIC_MODULE))
        return CUDA_ERROR_INVALID_HANDLE;
    return variable_of((const struct module *)handle, out, bytes, name);
}

/* Add a function with this name. */
static CUresult new_function(struct function **functions, struct library *library, const char *name,
                             struct function **out) {
    struct function function = {.magic = MAGIC_FUNCTION, .library = library, .next = *functions};
    if (strncmp(name, "spin_us_", 8) == 0)
        function.duration = strtoull(name + 8, NULL, 10) * 1000;
    else if (strncmp(name, "load_us_", 8) == 0)
        function.loading = function.duration = strtoull(name + 8, NULL, 10) * 1000;
    else if (strcmp(name, "spin_arg") == 0)
        function.argument = true;
    else if (strcmp(name, "meet") == 0)
        function.argument = function.meets = true;
    else if (strcmp(name, "hang") == 0)
        function.hang = true;
    else if (strncmp(name, "missing", 7) == 0 || *name == '\0')
        return CUDA_ERROR_NOT_FOUND;
    else if (strcmp(name, "noop") != 0)
        function.duration = OTHER_US * 1000;
    function.faults = strcmp(name, "fault") == 0;
    snprintf(function.name, NAME_BYTES, "%s", name);
    *out = malloc(sizeof **out);
    **out = function;
    *functions = *out;
    return CUDA_SUCCESS;
}

static CUresult function_of(struct module *module, const char *name, CUfunction *out) {
    CUresult result = take_code(module);
    return result == CUDA_SUCCESS ? new_function(&module->functions, NULL, name, (struct function **)out) : result;
}

EXPORT CUresult cuModuleGetFunction(CUfunction *out, CUmodule handle, const char *name) {
    if (!fake_is(handle, MAGIC_MODULE))
        return CUDA_ERROR_INVALID_HANDLE;
    if (out == NULL || name == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    CUresult result = function_of((struct module *)handle, name, out);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuLibraryLoadData(CUlibrary *out, const void *content, CUjit_option *jit, void **jit_values,
                                  unsigned int jit_count, CUlibraryOption *options, void **values, unsigned int count) {
    struct context *context;
    struct module *module;
    CUresult result = fake_initialized();
    (void)jit, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    if (result == CUDA_SUCCESS && out == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    struct library *library = calloc(1, sizeof *library);
    *library = (struct library){.magic = MAGIC_LIBRARY, .image = read_image(content)};
    pthread_mutex_lock(&fake_lock);
    if (eager() && fake_enter(&context) == CUDA_SUCCESS)
        result = instance(&module, library, context);
    pthread_mutex_unlock(&fake_lock);
    if (result == CUDA_SUCCESS)
        *out = (CUlibrary)library;
    else
        free(library);
    return result;
}

EXPORT CUresult cuLibraryLoadFromFile(CUlibrary *out, const char *path, CUjit_option *jit, void **jit_values,
                                      unsigned int jit_count, CUlibraryOption *options, void **values,
                                      unsigned int count) {
    char content[IMAGE_BYTES];
    return read_file(path, content)
               ? cuLibraryLoadData(out, content, jit, jit_values, jit_count, options, values, count)
               : CUDA_ERROR_FILE_NOT_FOUND;
}

EXPORT CUresult cuLibraryUnload(CUlibrary handle) {
    struct library *library = (struct library *)handle;
    if (!fake_is(library, MAGIC_LIBRARY))
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&fake_lock);
    for (struct module *module = modules, *next; module != NULL; module = next) {
        next = module->next;
        if (module->library == library)
            end(module);
    }
    for (struct function *kernel = library->kernels, *next; kernel != NULL; kernel = next) {
        next = kernel->next;
        kernel->magic = 0;
        free(kernel);
    }
    library->magic = 0;
    free(library);
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}

/* Get the library's module in the current context, loaded if necessary. With fake_lock. */
static CUresult here(CUlibrary handle, struct module **out) {
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result == CUDA_SUCCESS && !fake_is(handle, MAGIC_LIBRARY))
        result = CUDA_ERROR_INVALID_HANDLE;
    return result == CUDA_SUCCESS ? instance(out, (struct library *)handle, context) : result;
}

EXPORT CUresult cuLibraryGetModule(CUmodule *out, CUlibrary handle) {
    pthread_mutex_lock(&fake_lock);
    CUresult result = here(handle, (struct module **)out);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuLibraryGetGlobal(CUdeviceptr *out, size_t *bytes, CUlibrary handle, const char *name) {
    struct module *module;
    pthread_mutex_lock(&fake_lock);
    CUresult result = here(handle, &module);
    if (result == CUDA_SUCCESS)
        result = variable_of(module, out, bytes, name);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuLibraryGetKernel(CUkernel *out, CUlibrary handle, const char *name) {
    struct library *library = (struct library *)handle;
    if (!fake_is(library, MAGIC_LIBRARY))
        return CUDA_ERROR_INVALID_HANDLE;
    if (out == NULL || name == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    CUresult result = new_function(&library->kernels, library, name, (struct function **)out);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuKernelGetFunction(CUfunction *out, CUkernel handle) {
    const struct function *kernel = (const struct function *)handle;
    struct module *module;
    if (!fake_is(kernel, MAGIC_FUNCTION) || kernel->library == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&fake_lock);
    CUresult result = here((CUlibrary)kernel->library, &module);
    if (result == CUDA_SUCCESS)
        result = function_of(module, kernel->name, out);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

/* Before a launch of a library's kernel by its own handle: take the memory of the code, as a lookup of the function
 * would. */
static CUresult kernel_code(struct library *library) {
    struct module *module;
    if (library->image.code == 0)
        return CUDA_SUCCESS;
    pthread_mutex_lock(&fake_lock);
    CUresult result = here((CUlibrary)library, &module);
    if (result == CUDA_SUCCESS)
        result = take_code(module);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

/* Return the address of a settable attribute of a function; NULL: the attribute cannot be set. */
static int *settable(struct function *function, CUfunction_attribute attribute) {
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: return &function->shared_bytes;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: return &function->carveout;
    default: return NULL;
    }
}

CUresult fake_function_attribute(CUfunction handle, CUfunction_attribute attribute, const int *set, int *value) {
    struct function *function = (struct function *)handle;
    if (!fake_is(function, MAGIC_FUNCTION))
        return CUDA_ERROR_INVALID_HANDLE;
    int *kept = settable(function, attribute);
    if (set != NULL && (kept == NULL || *set < -1))
        return CUDA_ERROR_INVALID_VALUE;
    if (set != NULL)
        *kept = *set;
    else if (kept != NULL)
        *value = *kept;
    return CUDA_SUCCESS;
}

CUresult fake_kernel_work(CUfunction handle, void *const *arguments, struct work *work) {
    struct function *function = (struct function *)handle;
    if (!fake_is(function, MAGIC_FUNCTION))
        return CUDA_ERROR_INVALID_HANDLE;
    uint64_t loading = atomic_exchange(&function->loading, 0);
    if (loading > 0)
        nanosleep(&(struct timespec){.tv_sec = (time_t)(loading / 1000000000), .tv_nsec = (long)(loading % 1000000000)},
                  NULL);
    if (function->argument && (arguments == NULL || arguments[0] == NULL || (function->meets && arguments[1] == NULL)))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = function->library == NULL ? CUDA_SUCCESS : kernel_code(function->library);
    *work = (struct work){.type = CU_GRAPH_NODE_TYPE_KERNEL,
                          .hang = function->hang,
                          .faults = function->faults,
                          .device_ns = function->duration};
    if (function->meets) {
        work->meeting = *(_Atomic uint64_t **)arguments[0];
        work->met_at = *(const uint64_t *)arguments[1];
        work->device_ns = 1;
    } else if (function->argument) {
        work->device_ns = *(const uint64_t *)arguments[0];
    }
    return result;
}
