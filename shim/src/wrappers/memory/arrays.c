/* Arrays and mipmapped arrays.
 *
 * The driver does not report the bytes of an array. So the charge is computed: its rows and layers, rounded up to whole
 * tiles of the hardware. A sparse array, or an array with deferred mapping, takes no memory itself.
 */
#include "driver/entries.h"
#include "wrappers/memory/physical/virtual.h"
#include "memory/charge.h"
#include "memory/state.h"
#include "process/process.h"
#include "wrappers/memory/current_gpu.h"
#include "wrappers/memory/refused.h"

enum { TILE_WIDTH = 64, TILE_HEIGHT = 8 }; /* bytes, rows: a tile of block-linear memory */

/* Return the bits of one element, all channels together. For compressed formats, whose unit is 4 x 4 pixels, return the
 * bits per pixel. */
static uint64_t bits_of(CUarray_format format, uint64_t channels) {
    switch ((int)format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8: return 8 * channels;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF: return 16 * channels;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT: return 32 * channels;
    case 0xb0: return 12; /* NV12 */
    case 0x91:
    case 0x92:
    case 0x97:
    case 0x98: return 4; /* BC1, BC4 */
    case 0x93:
    case 0x94:
    case 0x95:
    case 0x96:
    case 0x99:
    case 0x9a: /* BC2, BC3, BC5 */
    case 0x9b:
    case 0x9c:
    case 0x9d:
    case 0x9e: return 8; /* BC6H, BC7 */
    case 0xc0:
    case 0xc6: return 8; /* normalized, 8 bits a channel */
    case 0xc1:
    case 0xc7: return 16;
    case 0xc2:
    case 0xc8: return 32;
    case 0xc3:
    case 0xc9: return 16; /* normalized, 16 bits a channel */
    case 0xc4:
    case 0xca: return 32;
    case 0xc5:
    case 0xcb: return 64;
    default: return 64; /* the largest of all other formats */
    }
}

#define MOST (UINT64_MAX >> 16) /* largest product of dimensions; larger ones are cut to it */
/* Bytes, more than any GPU has. Sizes are computed in bits and at most MOST, so a greater size may be cut. */
#define BEYOND_ANY (MOST / 8 / 2)

/* Return the product, at most MOST. */
static uint64_t times(uint64_t a, uint64_t b) {
    return b != 0 && a > MOST / b ? MOST : a * b;
}

static uint64_t level_bytes(uint64_t bits, uint64_t width, uint64_t height, uint64_t depth) {
    uint64_t row = memory_rounded((times(width, bits) + 7) / 8, TILE_WIDTH);
    uint64_t rows = height > 1 ? memory_rounded(height < MOST ? height : MOST, TILE_HEIGHT) : 1;
    return memory_rounded(times(times(row, rows), depth ? depth : 1), MEMORY_GRANULARITY);
}

static uint64_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *array, unsigned levels) {
    uint64_t bits = bits_of(array->Format, array->NumChannels), sum = 0;
    uint64_t width = array->Width, height = array->Height, depth = array->Depth;
    bool layered = (array->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)) != 0;
    if (array->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING))
        return 0;
    for (unsigned level = 0; level < levels && level < 64; level++) {
        sum += level_bytes(bits, width, height, depth);
        if (width <= 1 && height <= 1 && (depth <= 1 || layered))
            break;
        width = width > 1 ? width / 2 : width;
        height = height > 1 ? height / 2 : height;
        depth = depth > 1 && !layered ? depth / 2 : depth;
    }
    return sum;
}

/* Charge an array before it is created. An array larger than any GPU's memory is not charged, because the driver
 * refuses it. A sparse array is charged 0 bytes, so that the table contains it: its mappings end with it. */
static CUresult begin(struct charge *charge, const void *handle, const CUDA_ARRAY3D_DESCRIPTOR *array,
                      unsigned levels) {
    CUcontext context;
    int place;
    charge->allocation = NULL;
    CUresult result = current_gpu(&context, &place);
    if (result != CUDA_SUCCESS || handle == NULL || array == NULL || array->Width == 0)
        return result;
    uint64_t bytes = array_bytes(array, levels);
    return bytes < BEYOND_ANY ? charge_begin(charge, context, place, bytes) : CUDA_SUCCESS;
}

#define CREATE(symbol, handle, array, levels, ...)                                                                    \
    struct charge charge;                                                                                             \
    CUresult result = begin(&charge, handle, array, levels);                                                          \
    if (result != CUDA_SUCCESS)                                                                                       \
        return REFUSED(result, handle);                                                                               \
    result = HAS(symbol) ? DRIVER(symbol)(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND;                                        \
    charge_end(&charge, result == CUDA_SUCCESS, ALLOCATION_ARRAY, result == CUDA_SUCCESS ? (uintptr_t)*(handle) : 0); \
    return result

#define WIDE(narrow)                                                             \
    const CUDA_ARRAY3D_DESCRIPTOR wide = {.Width = narrow ? narrow->Width : 0,   \
                                          .Height = narrow ? narrow->Height : 0, \
                                          .Format = narrow ? narrow->Format : 0, \
                                          .NumChannels = narrow ? narrow->NumChannels : 0}

EXPORT CUresult cuArrayCreate(CUarray *handle, const CUDA_ARRAY_DESCRIPTOR_v1 *array) {
    WIDE(array);
    CREATE(cuArrayCreate, handle, &wide, 1, handle, array);
}

EXPORT CUresult cuArrayCreate_v2(CUarray *handle, const CUDA_ARRAY_DESCRIPTOR *array) {
    WIDE(array);
    CREATE(cuArrayCreate_v2, handle, &wide, 1, handle, array);
}

EXPORT CUresult cuArray3DCreate(CUarray *handle, const CUDA_ARRAY3D_DESCRIPTOR_v1 *array) {
    CUDA_ARRAY3D_DESCRIPTOR wide = {0};
    if (array != NULL)
        wide = (CUDA_ARRAY3D_DESCRIPTOR){array->Width,  array->Height,      array->Depth,
                                         array->Format, array->NumChannels, array->Flags};
    CREATE(cuArray3DCreate, handle, &wide, 1, handle, array);
}

EXPORT CUresult cuArray3DCreate_v2(CUarray *handle, const CUDA_ARRAY3D_DESCRIPTOR *array) {
    CREATE(cuArray3DCreate_v2, handle, array, 1, handle, array);
}

EXPORT CUresult cuMipmappedArrayCreate(CUmipmappedArray *handle, const CUDA_ARRAY3D_DESCRIPTOR *array,
                                       unsigned int levels) {
    CREATE(cuMipmappedArrayCreate, handle, array, levels, handle, array, levels);
}

#define DESTROY(symbol, type, array)                                                    \
    CUresult result = process_enter();                                                  \
    if (result != CUDA_SUCCESS)                                                         \
        return result;                                                                  \
    struct allocation *allocation = uncharge_begin(ALLOCATION_ARRAY, (uintptr_t)array); \
    result = HAS(symbol) ? DRIVER(symbol)(array) : CUDA_ERROR_NOT_FOUND;                \
    if (allocation != NULL && result == CUDA_SUCCESS)                                   \
        virtual_array_gone((CUarray)array);                                             \
    uncharge_end(allocation, result == CUDA_SUCCESS);                                   \
    return result

EXPORT CUresult cuArrayDestroy(CUarray array) {
    DESTROY(cuArrayDestroy, CUarray, array);
}

EXPORT CUresult cuMipmappedArrayDestroy(CUmipmappedArray array) {
    DESTROY(cuMipmappedArrayDestroy, CUmipmappedArray, array);
}
