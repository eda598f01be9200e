/* Virtual memory management: physical memory (cuMemCreate), its handles and its mappings.
 *
 * Guarantee: bytes are charged before they are allocated. The charge ends when the last handle and the last mapping
 * have ended. A mapping is into an address range or a sparse array (physical.h).
 */
#include "memory/charge.h"
#include "memory/state.h"
#include "memory/physical.h"
#include "memory/refusal.h"
#include "memory/credits.h"
#include "driver/entries.h"
#include "process/process.h"
#include "wrappers/memory/refused.h"
#include "wrappers/memory/physical/virtual.h"

/* Return the error of a cuMemCreate that the hook refuses: the driver's error if the arguments are invalid, else
 * CUDA_ERROR_OUT_OF_MEMORY. */
static CUresult refuse(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                       unsigned long long flags) {
    size_t step = 0;
    CUresult invalid = flags != 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    if (invalid == CUDA_SUCCESS && HAS(cuMemGetAllocationGranularity))
        invalid = DRIVER(cuMemGetAllocationGranularity)(&step, prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (invalid == CUDA_SUCCESS && step != 0 && size % step != 0)
        invalid = CUDA_ERROR_INVALID_VALUE;
    return invalid != CUDA_SUCCESS ? invalid : REFUSED(CUDA_ERROR_OUT_OF_MEMORY, handle);
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                            unsigned long long flags) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || !HAS(cuMemCreate))
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    if (handle == NULL || size == 0 || prop == NULL || prop->location.type == CU_MEM_LOCATION_TYPE_HOST ||
        prop->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA ||
        prop->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT)
        return DRIVER(cuMemCreate)(handle, size, prop, flags);
    int place = gpus_place(memory_state()->gpus, prop->location.id);
    if (place == GPUS_NO_DEVICE || (place < 0 && gpus_ungated(memory_state()->gpus)))
        return DRIVER(cuMemCreate)(handle, size, prop, flags);
    struct allocation *allocation = place < 0 ? NULL : physical_begin(size, place);
    if (allocation == NULL)
        return refuse(handle, size, prop, flags);
    if (!credits_reserve(place, size)) {
        allocation->physical->bytes = 0; /* nothing was charged */
        physical_end(allocation, false, 0);
        refusal_say(place, size);
        return refuse(handle, size, prop, flags);
    }
    result = DRIVER(cuMemCreate)(handle, size, prop, flags);
    physical_end(allocation, result == CUDA_SUCCESS, result == CUDA_SUCCESS ? *handle : 0);
    return result;
}

/* Count one more reference by a handle. `spare`: a new allocation, added to the table if the handle is not in it, else
 * freed. The caller holds the lock of struct gpus. */
static void know(CUmemGenericAllocationHandle handle, struct physical *physical, struct allocation *spare) {
    struct allocation *allocation = allocations_find(&memory_state()->allocations, ALLOCATION_HANDLE, handle);
    if (allocation != NULL) {
        allocation->physical->handles++;
    } else if (physical != NULL) {
        *spare = (struct allocation){.kind = ALLOCATION_HANDLE, .key = handle, .place = -1, .physical = physical};
        allocations_add(&memory_state()->allocations, spare);
        physical->handles++;
        return;
    }
    allocations_drop(&memory_state()->allocations, spare);
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    uint64_t left;
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || !HAS(cuMemRetainAllocationHandle))
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    memory_lock();
    struct allocation *spare = allocations_make(&memory_state()->allocations);
    struct physical *physical = spare ? physical_at((uintptr_t)address, &left) : NULL;
    if (physical != NULL)
        physical->pins++;
    memory_unlock();
    if (spare == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    result = DRIVER(cuMemRetainAllocationHandle)(handle, address);
    memory_lock();
    if (physical != NULL)
        physical->pins--;
    if (result == CUDA_SUCCESS)
        know(*handle, physical, spare);
    else
        allocations_drop(&memory_state()->allocations, spare);
    physical_unlock(physical);
    return result;
}

/* The handle leaves the table before the driver releases it (C3, memory/state.h). */
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || !HAS(cuMemRelease))
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    memory_lock();
    struct allocation *allocation = allocations_find(&memory_state()->allocations, ALLOCATION_HANDLE, handle);
    struct physical *physical = allocation ? allocation->physical : NULL;
    bool last = physical != NULL && physical->handles == 1;
    if (physical != NULL) {
        physical->handles--;
        physical->pins++;
    }
    if (last)
        allocations_take(&memory_state()->allocations, ALLOCATION_HANDLE, handle);
    memory_unlock();
    result = DRIVER(cuMemRelease)(handle);
    memory_lock();
    if (physical != NULL) {
        physical->pins--;
        physical->handles += result != CUDA_SUCCESS;
    }
    if (last && result == CUDA_SUCCESS)
        allocations_drop(&memory_state()->allocations, allocation);
    else if (last)
        allocations_add(&memory_state()->allocations, allocation);
    physical_unlock(physical);
    return result;
}

/* Mapping of one call, between begin_mapping and end_mapping. Both members NULL: the handle is unknown, and nothing is
 * counted.
 */
struct mapping {
    struct allocation *allocation;
    struct physical *physical;
};

/* Pin the memory of a handle for a mapping. Return false if host memory is exhausted. */
static bool begin_mapping(struct mapping *mapping, CUmemGenericAllocationHandle handle) {
    memory_lock();
    struct allocation *of = allocations_find(&memory_state()->allocations, ALLOCATION_HANDLE, handle);
    mapping->physical = of ? of->physical : NULL;
    mapping->allocation = of ? allocations_make(&memory_state()->allocations) : NULL;
    if (mapping->allocation != NULL)
        mapping->physical->pins++;
    memory_unlock();
    return of == NULL || mapping->allocation != NULL;
}

/* Add the mapping to the table if the driver made it, and remove the pin. `allocation`: kind, key, bytes and array of
 * the mapping. */
static void end_mapping(struct mapping *mapping, bool made, struct allocation allocation) {
    struct physical *physical = mapping->physical;
    if (physical == NULL)
        return;
    memory_lock();
    physical->pins--;
    physical->mappings += made;
    memory_state()->sparse += made && allocation.kind == ALLOCATION_SPARSE;
    if (made && allocation.bytes > memory_state()->largest_mapping)
        memory_state()->largest_mapping = allocation.bytes;
    allocation.physical = physical;
    allocation.place = -1;
    *mapping->allocation = allocation;
    if (made)
        allocations_add(&memory_state()->allocations, mapping->allocation);
    else
        allocations_drop(&memory_state()->allocations, mapping->allocation);
    physical_unlock(physical);
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
    struct mapping mapping;
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || !HAS(cuMemMap))
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    if (!begin_mapping(&mapping, handle))
        return CUDA_ERROR_OUT_OF_MEMORY;
    result = DRIVER(cuMemMap)(address, size, offset, handle, flags);
    kinds_forget(&memory_state()->kinds);
    end_mapping(&mapping, result == CUDA_SUCCESS,
                (struct allocation){.kind = ALLOCATION_MAPPING, .key = address, .bytes = size});
    return result;
}

/* Range of addresses. */
struct range {
    uint64_t from, size;
};

static bool begins_in(const struct allocation *allocation, const void *of) {
    const struct range *range = of;
    return allocation->kind == ALLOCATION_MAPPING && allocation->key - range->from < range->size;
}

/* Remove the mappings that begin in a range from the table, and return them as a list. */
static struct allocation *take_range(uint64_t address, uint64_t size) {
    struct allocation_table *table = &memory_state()->allocations;
    struct allocation *list = NULL;
    memory_lock();
    if (size / MAPPING_STEP >= table->bucket_count) { /* many addresses: searching the whole table is faster */
        list = allocations_take_all(table, begins_in, &(struct range){address, size});
    } else {
        for (uint64_t done = 0; done < size;) {
            struct allocation *allocation = allocations_take(table, ALLOCATION_MAPPING, address + done);
            done += allocation && allocation->bytes ? allocation->bytes : MAPPING_STEP;
            if (allocation != NULL) {
                allocation->next = list;
                list = allocation;
            }
        }
    }
    memory_unlock();
    return list;
}

/* Free the entry of a mapping that has ended. */
static void unmapped(struct allocation *allocation) {
    struct physical *physical = allocation->physical;
    memory_lock();
    physical->mappings--;
    memory_state()->sparse -= allocation->kind == ALLOCATION_SPARSE;
    allocations_drop(&memory_state()->allocations, allocation);
    physical_unlock(physical);
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || !HAS(cuMemUnmap))
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    struct allocation *list = take_range(address, size);
    result = DRIVER(cuMemUnmap)(address, size);
    for (struct allocation *next; list != NULL; list = next) {
        next = list->next;
        if (result == CUDA_SUCCESS) {
            unmapped(list);
        } else {
            memory_lock();
            allocations_add(&memory_state()->allocations, list);
            memory_unlock();
        }
    }
    return result;
}

/* Return the allocation key of a mapping into a sparse array: a hash of the array and of the mapped part. */
static uint64_t part(const CUarrayMapInfo *map) {
    uint64_t words[12] = {(uintptr_t)map->resource.array, (uint64_t)map->subresourceType};
    if (map->subresourceType == CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_MIPTAIL) {
        words[2] = map->subresource.miptail.layer;
        words[3] = map->subresource.miptail.offset;
        words[4] = map->subresource.miptail.size;
    } else {
        words[2] = map->subresource.sparseLevel.level;
        words[3] = map->subresource.sparseLevel.layer;
        words[4] = map->subresource.sparseLevel.offsetX;
        words[5] = map->subresource.sparseLevel.offsetY;
        words[6] = map->subresource.sparseLevel.offsetZ;
        words[7] = map->subresource.sparseLevel.extentWidth;
        words[8] = map->subresource.sparseLevel.extentHeight;
        words[9] = map->subresource.sparseLevel.extentDepth;
    }
    uint64_t hash = 0;
    for (unsigned i = 0; i < sizeof words / sizeof *words; i++)
        hash = (hash ^ words[i]) * 0x9e3779b97f4a7c15ull + (hash >> 29);
    return hash;
}

/* Map or unmap parts of arrays. A part keeps its memory charged until exactly this part is unmapped or mapped again, or
 * until the array is destroyed. If a program unmaps parts of other sizes, the charge ends later than the mapping, never
 * earlier. */
static CUresult map_array(CUresult (*call)(CUarrayMapInfo *, unsigned, CUstream), CUarrayMapInfo *list, unsigned count,
                          CUstream stream) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || call == NULL)
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    for (unsigned i = 0; list != NULL && i < count; i++)
        if (list[i].resource.array == NULL) /* the driver refuses the list, which may end here */
            return call(list, count, stream);
    struct mapping *mappings = list && count ? sys_map(count * sizeof *mappings) : NULL;
    if (list != NULL && count != 0 && mappings == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (unsigned i = 0; mappings != NULL && i < count; i++)
        if (list[i].memOperationType == CU_MEM_OPERATION_TYPE_MAP &&
            !begin_mapping(&mappings[i], list[i].memHandle.memHandle))
            result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS)
        result = call(list, count, stream);
    for (unsigned i = 0; mappings != NULL && i < count; i++) {
        uint64_t key = part(&list[i]);
        struct allocation *before = result == CUDA_SUCCESS ? uncharge_begin(ALLOCATION_SPARSE, key) : NULL;
        if (mappings[i].allocation != NULL)
            end_mapping(&mappings[i], result == CUDA_SUCCESS,
                        (struct allocation){.kind = ALLOCATION_SPARSE, .key = key, .array = list[i].resource.array});
        if (before != NULL)
            unmapped(before);
    }
    sys_unmap(mappings, count * sizeof *mappings);
    return result;
}

EXPORT CUresult cuMemMapArrayAsync(CUarrayMapInfo *list, unsigned int count, CUstream stream) {
    return map_array(DRIVER(cuMemMapArrayAsync), list, count, stream);
}

EXPORT CUresult cuMemMapArrayAsync_ptsz(CUarrayMapInfo *list, unsigned int count, CUstream stream) {
    return map_array(DRIVER(cuMemMapArrayAsync_ptsz), list, count, stream);
}

static bool in_array(const struct allocation *allocation, const void *array) {
    return allocation->kind == ALLOCATION_SPARSE && allocation->array == array;
}

void virtual_array_gone(CUarray array) {
    struct allocation *list = NULL;
    memory_lock();
    if (memory_state()->sparse > 0)
        list = allocations_take_all(&memory_state()->allocations, in_array, array);
    memory_unlock();
    for (struct allocation *next; list != NULL; list = next) {
        next = list->next;
        unmapped(list);
    }
}
