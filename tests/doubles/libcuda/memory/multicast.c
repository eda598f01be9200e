/* Multicast objects: handles that take no memory. Memory that is bound to an object stays taken until it is unbound or
 * the object ends. */
#include "memory/multicast.h"

#include <stdlib.h>

#include "memory/memory.h"

enum { MOST_DEVICES = FAKE_DEVICES };

struct object {
    struct physical *physical; /* its handle */
    unsigned wanted, count;    /* number of devices: requested, added */
    int devices[MOST_DEVICES];
    struct object *next;
};

struct binding {
    struct physical *object, *bound;
    int device;
    uint64_t at, bytes;
    struct binding *next;
};

static struct object *objects;
static struct binding *bindings;

static struct object **find(const struct physical *physical) {
    struct object **at = &objects;
    while (*at != NULL && (physical == NULL || (*at)->physical != physical))
        at = &(*at)->next;
    return at;
}

static bool has(const struct object *object, int device) {
    for (unsigned i = 0; i < object->count; i++)
        if (object->devices[i] == device)
            return true;
    return false;
}

/* Free the object's bindings within a range (`device` -1: on all devices). Return their number. */
static unsigned unbind(const struct physical *object, int device, uint64_t from, uint64_t bytes) {
    unsigned count = 0;
    for (struct binding **at = &bindings; *at != NULL;) {
        struct binding *binding = *at;
        if (binding->object != object || (device >= 0 && binding->device != device) || binding->at < from ||
            binding->at + binding->bytes > from + bytes) {
            at = &binding->next;
            continue;
        }
        *at = binding->next;
        fake_physical_unmap(binding->bound);
        free(binding);
        count++;
    }
    return count;
}

void fake_multicast_gone(const struct physical *physical) {
    struct object **at = find(physical), *object = *at;
    if (object == NULL)
        return;
    *at = object->next;
    unbind(physical, -1, 0, physical->bytes);
    free(object);
}

EXPORT CUresult cuMulticastGetGranularity(size_t *out, const CUmulticastObjectProp *properties,
                                          CUmulticastGranularity_flags option) {
    CUresult result = fake_initialized();
    if (result == CUDA_SUCCESS && (out == NULL || properties == NULL || option > CU_MULTICAST_GRANULARITY_RECOMMENDED))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *out = PAGE_BYTES;
    return result;
}

EXPORT CUresult cuMulticastCreate(CUmemGenericAllocationHandle *out, const CUmulticastObjectProp *properties) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    if (out == NULL || properties == NULL || properties->numDevices == 0 || properties->numDevices > MOST_DEVICES ||
        properties->size == 0 || properties->size % PAGE_BYTES != 0 || properties->flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    const CUmemAllocationProp how = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                     .requestedHandleTypes = (CUmemAllocationHandleType)properties->handleTypes};
    struct object *object = calloc(1, sizeof *object);
    pthread_mutex_lock(&fake_lock);
    object->physical = fake_physical_new(-1, properties->size, 0, &how);
    object->wanted = properties->numDevices;
    object->next = objects;
    objects = object;
    *out = (uintptr_t)object->physical;
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice ordinal) {
    int device;
    pthread_mutex_lock(&fake_lock);
    CUresult result = fake_find_device(ordinal, &device);
    struct object *object = *find(fake_physical_held(handle));
    if (result == CUDA_SUCCESS && (object == NULL || object->count == object->wanted || has(object, device)))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        object->devices[object->count++] = device;
    pthread_mutex_unlock(&fake_lock);
    return result;
}

/* With fake_lock. */
static CUresult bind(CUmemGenericAllocationHandle handle, size_t at, struct physical *bound, size_t offset,
                     size_t bytes, unsigned long long flags) {
    const struct object *object = *find(fake_physical_held(handle));
    if (object == NULL || bound == NULL || flags != 0 || bytes == 0 || bytes % PAGE_BYTES != 0 ||
        at % PAGE_BYTES != 0 || offset > bound->bytes || bytes > bound->bytes - offset ||
        at > object->physical->bytes || bytes > object->physical->bytes - at || !has(object, bound->device))
        return CUDA_ERROR_INVALID_VALUE;
    if (object->count < object->wanted)
        return CUDA_ERROR_SYSTEM_NOT_READY; /* all devices must be added first */
    for (const struct binding *other = bindings; other != NULL; other = other->next)
        if (other->object == object->physical && other->device == bound->device && other->at < at + bytes &&
            at < other->at + other->bytes)
            return CUDA_ERROR_INVALID_VALUE;
    struct binding *binding = malloc(sizeof *binding);
    *binding = (struct binding){.object = object->physical,
                                .bound = bound,
                                .device = bound->device,
                                .at = at,
                                .bytes = bytes,
                                .next = bindings};
    bindings = binding;
    fake_physical_map(bound);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMulticastBindMem(CUmemGenericAllocationHandle object, size_t at, CUmemGenericAllocationHandle memory,
                                   size_t offset, size_t bytes, unsigned long long flags) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    result = bind(object, at, fake_physical_held(memory), offset, bytes, flags);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuMulticastBindMem_v2(CUmemGenericAllocationHandle object, CUdevice device, size_t at,
                                      CUmemGenericAllocationHandle memory, size_t offset, size_t bytes,
                                      unsigned long long flags) {
    (void)device;
    return cuMulticastBindMem(object, at, memory, offset, bytes, flags);
}

EXPORT CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle object, size_t at, CUdeviceptr address, size_t bytes,
                                    unsigned long long flags) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    result = bind(object, at, fake_physical_mapped(address, bytes), 0, bytes, flags);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuMulticastBindAddr_v2(CUmemGenericAllocationHandle object, CUdevice device, size_t at,
                                       CUdeviceptr address, size_t bytes, unsigned long long flags) {
    (void)device;
    return cuMulticastBindAddr(object, at, address, bytes, flags);
}

EXPORT CUresult cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice ordinal, size_t at, size_t bytes) {
    int device;
    pthread_mutex_lock(&fake_lock);
    CUresult result = fake_find_device(ordinal, &device);
    const struct physical *physical = fake_physical_held(handle);
    if (result == CUDA_SUCCESS && (*find(physical) == NULL || unbind(physical, device, at, bytes) == 0))
        result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&fake_lock);
    return result;
}
