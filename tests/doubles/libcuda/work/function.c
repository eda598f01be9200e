/* Attributes and occupancy of functions, as a program queries them before a launch. They are computed for a GPU with 64
 * K registers, 227 KiB of shared memory and 2,048 threads per multiprocessor, and for a function with 32 registers per
 * thread and no static shared memory. */
#include "work/module.h"

enum { MOST_THREADS = 1024, REGISTERS = 32, MOST_SHARED = 227 << 10, THREADS_RESIDENT = 2048, BLOCKS_RESIDENT = 32 };

EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    if (value == NULL || attribute >= CU_FUNC_ATTRIBUTE_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? MOST_THREADS
             : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? REGISTERS
             : attribute == CU_FUNC_ATTRIBUTE_PTX_VERSION || attribute == CU_FUNC_ATTRIBUTE_BINARY_VERSION ? 90
                                                                                                           : 0;
    return fake_function_attribute(function, attribute, NULL, value);
}

EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && value > MOST_SHARED)
        return CUDA_ERROR_INVALID_VALUE;
    return fake_function_attribute(function, attribute, &value, NULL);
}

EXPORT CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) {
    int ignored;
    (void)config;
    return fake_function_attribute(function, CU_FUNC_ATTRIBUTE_NUM_REGS, NULL, &ignored);
}

/* Return the number of blocks of this size that fit on a multiprocessor at the same time. */
static int resident(int threads, size_t shared) {
    int blocks = THREADS_RESIDENT / ((threads + 31) / 32 * 32);
    if (shared > 0 && MOST_SHARED / shared < (size_t)blocks)
        blocks = (int)(MOST_SHARED / shared);
    return blocks < BLOCKS_RESIDENT ? blocks : BLOCKS_RESIDENT;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads,
                                                            size_t shared) {
    int ignored;
    if (blocks == NULL || threads <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    *blocks = threads > MOST_THREADS ? 0 : resident(threads, shared);
    return fake_function_attribute(function, CU_FUNC_ATTRIBUTE_NUM_REGS, NULL, &ignored);
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction function, int threads,
                                                                     size_t shared, unsigned int flags) {
    (void)flags;
    return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

EXPORT CUresult cuOccupancyMaxPotentialBlockSize(int *least_grid, int *threads, CUfunction function,
                                                 CUoccupancyB2DSize shared_of, size_t shared, int limit) {
    if (least_grid == NULL || threads == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    struct context *context;
    int processors, ignored;
    CUresult result = fake_enter(&context);
    if (result == CUDA_SUCCESS)
        result = fake_function_attribute(function, CU_FUNC_ATTRIBUTE_NUM_REGS, NULL, &ignored);
    if (result == CUDA_SUCCESS)
        result = cuDeviceGetAttribute(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                                      fake_ordinal_of(context->device));
    if (result != CUDA_SUCCESS)
        return result;
    *threads = limit > 0 && limit < MOST_THREADS ? limit : MOST_THREADS;
    *least_grid = processors * resident(*threads, shared_of != NULL ? shared_of(*threads) : shared);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(int *least_grid, int *threads, CUfunction function,
                                                          CUoccupancyB2DSize shared_of, size_t shared, int limit,
                                                          unsigned int flags) {
    if (least_grid == NULL || threads == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    (void)flags;
    return cuOccupancyMaxPotentialBlockSize(least_grid, threads, function, shared_of, shared, limit);
}

EXPORT CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, CUfunction function, int blocks, int threads) {
    int ignored;
    if (bytes == NULL || blocks <= 0 || threads <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    *bytes = MOST_SHARED / (size_t)blocks;
    return fake_function_attribute(function, CU_FUNC_ATTRIBUTE_NUM_REGS, NULL, &ignored);
}
