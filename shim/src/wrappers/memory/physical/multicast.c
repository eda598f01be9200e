/* Multicast objects: handles that take no memory themselves.
 *
 * Physical memory that is bound to an object stays charged until it is unbound, or until the object's last handle and
 * last mapping have ended.
 */
#include "memory/charge.h"
#include "memory/state.h"
#include "memory/physical.h"
#include "driver/entries.h"
#include "process/process.h"

EXPORT CUresult cuMulticastCreate(CUmemGenericAllocationHandle *object, const CUmulticastObjectProp *properties) {
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS || !HAS(cuMulticastCreate))
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
    struct allocation *allocation = physical_begin(0, -1);
    if (allocation == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    result = DRIVER(cuMulticastCreate)(object, properties);
    physical_end(allocation, result == CUDA_SUCCESS, result == CUDA_SUCCESS ? *object : 0);
    return result;
}

/* Bindings of one call, between its start and its end. */
struct binds {
    struct physical *object;  /* pinned object; NULL: the handle is unknown, and nothing is counted */
    struct binding *bindings; /* bindings of the call; each counts as a mapping already */
};

/* Move the bindings to the object if the driver made them. Otherwise free them. */
static void end(struct binds *binds, bool bound) {
    struct binding *bindings = binds->bindings;
    if (binds->object == NULL)
        return;
    memory_lock();
    if (bound && bindings != NULL) {
        struct binding *last = bindings;
        while (last->next != NULL)
            last = last->next;
        last->next = binds->object->bindings;
        binds->object->bindings = bindings;
        bindings = NULL;
    }
    binds->object->pins--;
    physical_unlock(binds->object);
    physical_unbound(bindings);
}

static CUresult begin_memory(struct binds *binds, CUmemGenericAllocationHandle object, uint64_t at,
                             CUmemGenericAllocationHandle handle, uint64_t bytes) {
    *binds = (struct binds){0};
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS)
        return result;
    memory_lock();
    struct physical *bound = physical_of(handle);
    binds->object = physical_of(object);
    if (binds->object != NULL)
        binds->object->pins++;
    bool room = binds->object == NULL || bound == NULL || physical_bind(&binds->bindings, bound, at, bytes);
    memory_unlock();
    if (!room)
        end(binds, false);
    return room ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Begin to bind a range of addresses, which may contain several mappings. */
static CUresult begin_address(struct binds *binds, CUmemGenericAllocationHandle object, uint64_t at, uint64_t address,
                              uint64_t bytes) {
    *binds = (struct binds){0};
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS)
        return result;
    memory_lock();
    bool room = true;
    binds->object = physical_of(object);
    if (binds->object != NULL)
        binds->object->pins++;
    for (uint64_t done = 0, left = 0; binds->object != NULL && room && done < bytes; done += left) {
        struct physical *bound = physical_at(address + done, &left);
        if (bound == NULL)
            break;
        left = left < bytes - done ? left : bytes - done;
        room = physical_bind(&binds->bindings, bound, at + done, left);
    }
    memory_unlock();
    if (!room)
        end(binds, false);
    return room ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

#define BIND(begin_call, symbol, ...)                                          \
    struct binds binds;                                                        \
    CUresult result = begin_call;                                              \
    if (result != CUDA_SUCCESS)                                                \
        return result;                                                         \
    result = HAS(symbol) ? DRIVER(symbol)(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND; \
    end(&binds, result == CUDA_SUCCESS);                                       \
    return result

EXPORT CUresult cuMulticastBindMem(CUmemGenericAllocationHandle object, size_t at, CUmemGenericAllocationHandle handle,
                                   size_t offset, size_t size, unsigned long long flags) {
    BIND(begin_memory(&binds, object, at, handle, size), cuMulticastBindMem, object, at, handle, offset, size, flags);
}

EXPORT CUresult cuMulticastBindMem_v2(CUmemGenericAllocationHandle object, CUdevice device, size_t at,
                                      CUmemGenericAllocationHandle handle, size_t offset, size_t size,
                                      unsigned long long flags) {
    BIND(begin_memory(&binds, object, at, handle, size), cuMulticastBindMem_v2, object, device, at, handle, offset,
         size, flags);
}

EXPORT CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle object, size_t at, CUdeviceptr address, size_t size,
                                    unsigned long long flags) {
    BIND(begin_address(&binds, object, at, address, size), cuMulticastBindAddr, object, at, address, size, flags);
}

EXPORT CUresult cuMulticastBindAddr_v2(CUmemGenericAllocationHandle object, CUdevice device, size_t at,
                                       CUdeviceptr address, size_t size, unsigned long long flags) {
    BIND(begin_address(&binds, object, at, address, size), cuMulticastBindAddr_v2, object, device, at, address, size,
         flags);
}

/* Unbind the memory of one GPU within a range of the object. */
EXPORT CUresult cuMulticastUnbind(CUmemGenericAllocationHandle object, CUdevice device, size_t from, size_t size) {
    struct binds binds = {0};
    CUresult result = process_enter();
    if (result != CUDA_SUCCESS)
        return result;
    int place = gpus_place(memory_state()->gpus, device);
    memory_lock();
    binds.object = physical_of(object);
    if (binds.object != NULL)
        binds.object->pins++;
    for (struct binding **link = binds.object ? &binds.object->bindings : NULL; link != NULL && *link != NULL;) {
        struct binding *binding = *link;
        bool elsewhere = binding->bound->place >= 0 && binding->bound->place != place;
        if (elsewhere || binding->at < from || binding->bytes > size || binding->at - from > size - binding->bytes) {
            link = &binding->next;
            continue;
        }
        *link = binding->next;
        binding->next = binds.bindings;
        binds.bindings = binding;
    }
    memory_unlock();
    result = HAS(cuMulticastUnbind) ? DRIVER(cuMulticastUnbind)(object, device, from, size) : CUDA_ERROR_NOT_FOUND;
    end(&binds, result != CUDA_SUCCESS); /* on failure, the object gets its bindings back */
    return result;
}
