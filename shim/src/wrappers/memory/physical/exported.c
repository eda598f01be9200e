/* Shared physical memory: exported and imported handles, and descriptors of address ranges (dma-buf).
 *
 * Guarantees:
 * - Exported memory stays charged until the last copy of its descriptor is closed, in any process (exports.h).
 * - Memory imported from another process is charged to the process that created it.
 */
#include "driver/entries.h"
#include "memory/exports.h"
#include "memory/physical.h"
#include "memory/state.h"
#include "process/process.h"

/* Imported memory is not charged to this process. If the process imports its own memory, the driver may return a handle
 * that is in the table already. */
EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *from,
                                               CUmemAllocationHandleType type) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || !HAS(cuMemImportFromShareableHandle))
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    struct allocation *allocation = physical_begin(0, -1);
    if (allocation == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    result = DRIVER(cuMemImportFromShareableHandle)(handle, from, type);
    if (result == CUDA_SUCCESS && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        allocation->physical->kept = exports_keep((int)(intptr_t)from);
    memory_lock();
    struct physical *known = result == CUDA_SUCCESS ? physical_of(*handle) : NULL;
    if (known != NULL)
        known->handles++;
    memory_unlock();
    bool fresh = result == CUDA_SUCCESS && known == NULL;
    physical_end(allocation, fresh, fresh ? *handle : 0);
    return result;
}

/* Watch a descriptor that the driver has created for physical memory (exports.h). If this process has too few
 * descriptors for that, close it and return an error. */
static CUresult watch(struct physical *physical, int *descriptor, CUresult result) {
    if (result == CUDA_SUCCESS && !exports_watch(&physical->exports, *descriptor)) {
        sys_close(*descriptor);
        *descriptor = -1;
        result = CUDA_ERROR_OPERATING_SYSTEM;
    }
    return result;
}

static void unpin(struct physical *physical) {
    memory_lock();
    physical->pins--;
    physical_unlock(physical);
}

EXPORT CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle,
                                             CUmemAllocationHandleType type, unsigned long long flags) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || !HAS(cuMemExportToShareableHandle))
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    memory_lock();
    struct physical *physical = physical_of(handle);
    if (physical != NULL)
        physical->pins++;
    memory_unlock();
    result = DRIVER(cuMemExportToShareableHandle)(out, handle, type, flags);
    if (physical == NULL)
        return result;
    if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        result = watch(physical, out, result);
    unpin(physical);
    return result;
}

/* Pin the physical memory that is mapped to a range of addresses, and return it. Several mappings: return an object to
 * which the memory of each is bound. Return NULL if the memory is not known, or if host memory is exhausted (`*room` is
 * then false). */
static struct physical *pin_range(uint64_t address, uint64_t size, bool *room) {
    struct physical *first = NULL, *all = NULL, *piece;
    memory_lock();
    *room = true;
    for (uint64_t done = 0, left = 0; *room && done < size; done += left) {
        piece = physical_within(address + done, &left);
        if (piece == NULL)
            break;
        if (first == NULL) {
            first = piece;
            first->pins++;
            continue;
        }
        if (all == NULL)
            all = physical_object(first);
        *room = all != NULL && physical_bind(&all->bindings, piece, done, left);
    }
    memory_unlock();
    if (all == NULL && *room)
        return first;
    if (first != NULL)
        unpin(first);
    if (all != NULL && !*room)
        unpin(all);
    return *room ? all : NULL;
}

EXPORT CUresult cuMemGetHandleForAddressRange(void *out, CUdeviceptr address, size_t size, CUmemRangeHandleType type,
                                              unsigned long long flags) {
    bool room;
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || !HAS(cuMemGetHandleForAddressRange))
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    struct physical *physical = pin_range(address, size, &room);
    if (!room)
        return CUDA_ERROR_OUT_OF_MEMORY;
    result = DRIVER(cuMemGetHandleForAddressRange)(out, address, size, type, flags);
    if (physical == NULL)
        return result;
    if (type == CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD)
        result = watch(physical, out, result);
    unpin(physical);
    return result;
}
