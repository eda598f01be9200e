/* Mappings of physical memory into arrays that take no memory themselves: sparse arrays (tile by tile), and arrays with
 * deferred mapping.
 *
 * A tile keeps its memory until the tile is unmapped or mapped to other memory, or its array ends. Mappings take effect
 * during the call, and not when the stream reaches them.
 */
#include "memory/sparse.h"

#include <stdlib.h>
#include <string.h>

#include "memory/array.h"
#include "memory/virtual.h"

enum { TILE = 64 << 10 };

struct tile {
    const void *array;
    CUarraySparseSubresourceType type;
    unsigned place[8]; /* coordinates by which the program names the tile */
    struct physical *physical;
    struct tile *next;
};

static struct tile *tiles;

static struct tile tile_of(const CUarrayMapInfo *what) {
    struct tile tile = {.array = what->resource.array, .type = what->subresourceType};
    if (what->subresourceType == CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL) {
        memcpy(tile.place, &what->subresource.sparseLevel, sizeof what->subresource.sparseLevel);
    } else {
        tile.place[0] = what->subresource.miptail.layer;
        tile.place[1] = (unsigned)(what->subresource.miptail.offset / TILE);
    }
    return tile;
}

static void drop(struct tile **at) {
    struct tile *tile = *at;
    *at = tile->next;
    fake_physical_unmap(tile->physical);
    free(tile);
}

void fake_tiles_of_array_gone(const void *array) {
    for (struct tile **at = &tiles; *at != NULL;)
        if ((*at)->array == array)
            drop(at);
        else
            at = &(*at)->next;
}

static bool valid(const CUarrayMapInfo *what) {
    bool mipmap = what->resourceType == CU_RESOURCE_TYPE_MIPMAPPED_ARRAY;
    bool maps = what->memOperationType == CU_MEM_OPERATION_TYPE_MAP;
    if (!mipmap && what->resourceType != CU_RESOURCE_TYPE_ARRAY)
        return false;
    if (!fake_is(what->resource.array, mipmap ? MAGIC_MIPMAP : MAGIC_ARRAY) || !fake_array_maps(what->resource.array))
        return false;
    if (!maps)
        return what->memOperationType == CU_MEM_OPERATION_TYPE_UNMAP;
    return what->memHandleType == CU_MEM_HANDLE_TYPE_GENERIC && what->offset % TILE == 0 &&
           fake_physical_held(what->memHandle.memHandle) != NULL &&
           what->offset < fake_physical_held(what->memHandle.memHandle)->bytes;
}

static void apply(const CUarrayMapInfo *what) {
    struct tile wanted = tile_of(what);
    struct tile **at = &tiles;
    if (what->memOperationType == CU_MEM_OPERATION_TYPE_MAP) { /* mapped before the old mapping ends, in case it is the
                                                                  same memory */
        wanted.physical = fake_physical_held(what->memHandle.memHandle);
        fake_physical_map(wanted.physical);
    }
    while (*at != NULL && ((*at)->array != wanted.array || (*at)->type != wanted.type ||
                           memcmp((*at)->place, wanted.place, sizeof wanted.place) != 0))
        at = &(*at)->next;
    if (*at != NULL)
        drop(at);
    if (wanted.physical != NULL) {
        struct tile *kept = malloc(sizeof *kept);
        wanted.next = tiles;
        *kept = wanted;
        tiles = kept;
    }
}

EXPORT CUresult cuMemMapArrayAsync(CUarrayMapInfo *list, unsigned int count, CUstream handle) {
    struct stream *stream;
    CUresult result = fake_enter_stream(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (list == NULL || count == 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    result = fake_not_captured(stream);
    for (unsigned i = 0; i < count && result == CUDA_SUCCESS; i++)
        if (!valid(&list[i]))
            result = CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count && result == CUDA_SUCCESS; i++)
        apply(&list[i]);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

static CUresult properties(CUDA_ARRAY_SPARSE_PROPERTIES *out, const void *array, unsigned magic) {
    if (!fake_is(array, magic))
        return CUDA_ERROR_INVALID_HANDLE;
    if (out == NULL || !fake_array_maps(array))
        return CUDA_ERROR_INVALID_VALUE;
    *out = (CUDA_ARRAY_SPARSE_PROPERTIES){
        .tileExtent = {.width = TILE / 128 / fake_array_element_bytes((CUarray)array), .height = 128, .depth = 1}};
    return CUDA_SUCCESS;
}

EXPORT CUresult cuArrayGetSparseProperties(CUDA_ARRAY_SPARSE_PROPERTIES *out, CUarray array) {
    return properties(out, array, MAGIC_ARRAY);
}

EXPORT CUresult cuMipmappedArrayGetSparseProperties(CUDA_ARRAY_SPARSE_PROPERTIES *out, CUmipmappedArray array) {
    return properties(out, array, MAGIC_MIPMAP);
}
