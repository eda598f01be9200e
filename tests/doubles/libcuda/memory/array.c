/* Arrays and mipmapped arrays: device memory with a handle and without an address.
 *
 * Bytes of a level: a row has width x channels x bytes of the format, rounded up to 64. A level higher than 1 has a
 * multiple of 8 rows. Rows are multiplied by depth, layers or faces. The sum is rounded up to 512. Sparse arrays, and
 * arrays with deferred mapping, take no memory themselves.
 */
#include "memory/array.h"

#include <stdlib.h>
#include <string.h>

#include "memory/memory.h"
#include "memory/sparse.h"

enum { ROW_BYTES = 64, ROWS = 8 };

struct array {
    unsigned magic; /* MAGIC_ARRAY or MAGIC_MIPMAP */
    struct context *context;
    int device;
    CUDA_ARRAY3D_DESCRIPTOR shape;
    uint64_t bytes;       /* bytes taken on the device */
    struct array *levels; /* levels of a mipmapped array, or planes of an array */
    unsigned level_count;
    bool part; /* a level or a plane, which ends together with its array */
    struct array *next;
};

static struct array *arrays;

struct format {
    unsigned bytes, block; /* bytes of an element of one channel; bytes of a block of 4 x 4 elements of all channels */
};

static struct format format_of(CUarray_format format) {
    switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
    case CU_AD_FORMAT_UNORM_INT8X1:
    case CU_AD_FORMAT_SNORM_INT8X1: return (struct format){1, 1};
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
    case CU_AD_FORMAT_UNORM_INT8X2:
    case CU_AD_FORMAT_SNORM_INT8X2:
    case CU_AD_FORMAT_UNORM_INT16X1:
    case CU_AD_FORMAT_SNORM_INT16X1: return (struct format){2, 1};
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
    case CU_AD_FORMAT_UNORM_INT8X4:
    case CU_AD_FORMAT_SNORM_INT8X4:
    case CU_AD_FORMAT_UNORM_INT16X2:
    case CU_AD_FORMAT_SNORM_INT16X2: return (struct format){4, 1};
    case CU_AD_FORMAT_UNORM_INT16X4:
    case CU_AD_FORMAT_SNORM_INT16X4: return (struct format){8, 1};
    case CU_AD_FORMAT_BC1_UNORM:
    case CU_AD_FORMAT_BC1_UNORM_SRGB:
    case CU_AD_FORMAT_BC4_UNORM:
    case CU_AD_FORMAT_BC4_SNORM: return (struct format){8, 4};
    case CU_AD_FORMAT_BC2_UNORM:
    case CU_AD_FORMAT_BC2_UNORM_SRGB:
    case CU_AD_FORMAT_BC3_UNORM:
    case CU_AD_FORMAT_BC3_UNORM_SRGB:
    case CU_AD_FORMAT_BC5_UNORM:
    case CU_AD_FORMAT_BC5_SNORM:
    case CU_AD_FORMAT_BC6H_UF16:
    case CU_AD_FORMAT_BC6H_SF16:
    case CU_AD_FORMAT_BC7_UNORM:
    case CU_AD_FORMAT_BC7_UNORM_SRGB: return (struct format){16, 4};
    default: return (struct format){0, 1};
    }
}

/* Return whether the format already includes all channels (UNORM_INT8X4), so that its bytes are not multiplied by
 * NumChannels. */
static bool counted(CUarray_format format) {
    return format >= 0x91;
}

unsigned fake_array_element_bytes(CUarray handle) {
    const CUDA_ARRAY3D_DESCRIPTOR *shape = &((const struct array *)handle)->shape;
    return format_of(shape->Format).bytes * (counted(shape->Format) ? 1 : shape->NumChannels);
}

static uint64_t at_least_1(uint64_t value) {
    return value > 0 ? value : 1;
}

bool fake_array_holds(CUarray handle, size_t offset, size_t bytes) {
    const CUDA_ARRAY3D_DESCRIPTOR *shape = &((const struct array *)handle)->shape;
    uint64_t rows = at_least_1(shape->Height) * at_least_1(shape->Depth);
    uint64_t all = at_least_1(shape->Width) * rows * fake_array_element_bytes(handle);
    return offset <= all && bytes <= all - offset;
}

static uint64_t blocks(uint64_t elements, unsigned block) {
    return (at_least_1(elements) + block - 1) / block;
}

static uint64_t level_bytes(const CUDA_ARRAY3D_DESCRIPTOR *shape) {
    struct format format = format_of(shape->Format);
    uint64_t row = blocks(shape->Width, format.block) * format.bytes;
    if (!counted(shape->Format))
        row *= shape->NumChannels;
    uint64_t rows = blocks(shape->Height, format.block);
    row = fake_round(row, ROW_BYTES);
    if (rows > 1)
        rows = fake_round(rows, ROWS);
    return fake_round(row * rows * at_least_1(shape->Depth), GRANULARITY);
}

static bool layered(const CUDA_ARRAY3D_DESCRIPTOR *shape) {
    return (shape->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)) != 0;
}

static bool valid(const CUDA_ARRAY3D_DESCRIPTOR *shape) {
    return shape->Width > 0 && (shape->NumChannels == 1 || shape->NumChannels == 2 || shape->NumChannels == 4) &&
           shape->Width <= (1 << 20) && shape->Height <= (1 << 20) && shape->Depth <= (1 << 20) &&
           format_of(shape->Format).bytes != 0;
}

static CUDA_ARRAY3D_DESCRIPTOR halved(const CUDA_ARRAY3D_DESCRIPTOR *shape) {
    CUDA_ARRAY3D_DESCRIPTOR next = *shape;
    next.Width = at_least_1(shape->Width / 2);
    next.Height = shape->Height > 1 ? shape->Height / 2 : shape->Height;
    next.Depth = shape->Depth > 1 && !layered(shape) ? shape->Depth / 2 : shape->Depth;
    return next;
}

bool fake_array_maps(const void *array) {
    const unsigned maps = CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING;
    return (((const struct array *)array)->shape.Flags & maps) != 0;
}

static struct array array_of(struct context *context, unsigned magic, const CUDA_ARRAY3D_DESCRIPTOR *shape) {
    return (struct array){
        .magic = magic, .context = fake_memory_owner(context), .device = context->device, .shape = *shape};
}

/* `elsewhere`: the array takes no memory, because its memory is external (Vulkan, for example). */
static CUresult create(struct array **out, const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned levels, bool elsewhere) {
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (out == NULL || !valid(shape))
        return CUDA_ERROR_INVALID_VALUE;
    struct array *array = malloc(sizeof *array);
    *array = array_of(context, levels > 0 ? MAGIC_MIPMAP : MAGIC_ARRAY, shape);
    array->level_count = levels;
    array->levels = levels > 0 ? calloc(levels, sizeof *array->levels) : NULL;
    CUDA_ARRAY3D_DESCRIPTOR level = *shape;
    for (unsigned i = 0; i < (levels > 0 ? levels : 1); i++, level = halved(&level)) {
        array->bytes += level_bytes(&level);
        if (levels > 0) {
            array->levels[i] = array_of(context, MAGIC_ARRAY, &level);
            array->levels[i].part = true;
        }
    }
    if (elsewhere || fake_array_maps(array))
        array->bytes = 0;
    pthread_mutex_lock(&fake_lock);
    result = fake_unsafe_call();
    if (result == CUDA_SUCCESS && !fake_state_take(array->device, FAKE_ARRAY, array->bytes))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS) {
        array->next = arrays;
        arrays = array;
        *out = array;
    } else {
        free(array->levels);
        free(array);
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

/* With fake_lock. */
static void end(struct array **at) {
    struct array *array = *at;
    *at = array->next;
    fake_state_give(array->device, FAKE_ARRAY, array->bytes);
    fake_tiles_of_array_gone(array);
    for (unsigned i = 0; i < array->level_count; i++)
        array->levels[i].magic = 0;
    array->magic = 0;
    free(array->levels);
    free(array);
}

static CUresult destroy(void *handle, unsigned magic) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    result = fake_unsafe_call();
    struct array **at = &arrays;
    while (*at != NULL && *at != handle)
        at = &(*at)->next;
    if (result == CUDA_SUCCESS && (*at == NULL || (*at)->magic != magic))
        result = CUDA_ERROR_INVALID_HANDLE;
    if (result == CUDA_SUCCESS)
        end(at);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

void fake_arrays_of_context_gone(struct context *context) {
    for (struct array **at = &arrays; *at != NULL;)
        if ((*at)->context == context)
            end(at);
        else
            at = &(*at)->next;
}

EXPORT CUresult cuArray3DCreate_v2(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape) {
    return shape == NULL ? CUDA_ERROR_INVALID_VALUE : create((struct array **)out, shape, 0, false);
}

EXPORT CUresult cuArrayCreate_v2(CUarray *out, const CUDA_ARRAY_DESCRIPTOR *shape) {
    if (shape == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    CUDA_ARRAY3D_DESCRIPTOR box = {
        .Width = shape->Width, .Height = shape->Height, .Format = shape->Format, .NumChannels = shape->NumChannels};
    return create((struct array **)out, &box, 0, false);
}

EXPORT CUresult cuArrayDestroy(CUarray handle) {
    return destroy(handle, MAGIC_ARRAY);
}

static CUresult create_levels(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned levels,
                              bool elsewhere) {
    if (shape == NULL || levels == 0)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t longest = shape->Width > shape->Height ? shape->Width : shape->Height;
    if (!layered(shape) && shape->Depth > longest)
        longest = shape->Depth;
    unsigned most = 1;
    while (longest >>= 1)
        most++; /* number of levels until all sizes are 1 */
    return create((struct array **)out, shape, levels < most ? levels : most, elsewhere);
}

EXPORT CUresult cuMipmappedArrayCreate(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape,
                                       unsigned int levels) {
    return create_levels(out, shape, levels, false);
}

CUresult fake_mipmap_elsewhere(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned levels) {
    return create_levels(out, shape, levels, true);
}

EXPORT CUresult cuMipmappedArrayDestroy(CUmipmappedArray handle) {
    return destroy(handle, MAGIC_MIPMAP);
}

EXPORT CUresult cuMipmappedArrayGetLevel(CUarray *out, CUmipmappedArray handle, unsigned int level) {
    struct array *array = (struct array *)handle;
    if (!fake_is(array, MAGIC_MIPMAP))
        return CUDA_ERROR_INVALID_HANDLE;
    if (level >= array->level_count)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (CUarray)&array->levels[level];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *shape, CUarray handle) {
    if (shape == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (!fake_is(handle, MAGIC_ARRAY))
        return CUDA_ERROR_INVALID_HANDLE;
    *shape = ((const struct array *)handle)->shape;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *shape, CUarray handle) {
    if (shape == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (!fake_is(handle, MAGIC_ARRAY))
        return CUDA_ERROR_INVALID_HANDLE;
    const CUDA_ARRAY3D_DESCRIPTOR *box = &((const struct array *)handle)->shape;
    *shape = (CUDA_ARRAY_DESCRIPTOR){
        .Width = box->Width, .Height = box->Height, .Format = box->Format, .NumChannels = box->NumChannels};
    return CUDA_SUCCESS;
}

static CUresult requirements(const struct array *array, CUDA_ARRAY_MEMORY_REQUIREMENTS *out, uint64_t bytes) {
    if (!(array->shape.Flags & CUDA_ARRAY3D_DEFERRED_MAPPING))
        return CUDA_ERROR_INVALID_VALUE;
    *out = (CUDA_ARRAY_MEMORY_REQUIREMENTS){.size = fake_round(bytes, ARRAY_GRANULARITY), .alignment = PAGE_BYTES};
    return CUDA_SUCCESS;
}

EXPORT CUresult cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *out, CUarray handle, CUdevice device) {
    const struct array *array = (const struct array *)handle;
    (void)device;
    return fake_is(array, MAGIC_ARRAY) ? requirements(array, out, level_bytes(&array->shape))
                                       : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuMipmappedArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *out, CUmipmappedArray handle,
                                                      CUdevice device) {
    const struct array *array = (const struct array *)handle;
    uint64_t bytes = 0;
    (void)device;
    if (!fake_is(array, MAGIC_MIPMAP))
        return CUDA_ERROR_INVALID_HANDLE;
    for (unsigned i = 0; i < array->level_count; i++)
        bytes += level_bytes(&array->levels[i].shape);
    return requirements(array, out, bytes);
}
