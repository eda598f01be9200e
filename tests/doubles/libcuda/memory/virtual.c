/* Virtual memory management of the double: physical memory with handles, reserved addresses, and mappings between them.
 *
 * Physical memory, a multiple of 2 MiB, is freed with its last reference (creation, retain, import), mapping and
 * descriptor. Values of ended handles are reused. Memory is exported as a descriptor, which keeps the memory taken, or
 * as a fabric handle, which does not. An importing process gets a handle that keeps the memory, which still counts to
 * the process that created it. After a fabric import, it counts to the importer once its creator has ended.
 */
#include "memory/virtual.h"

#include <stdlib.h>
#include <unistd.h>

#include "memory/exported.h"
#include "memory/memory.h"
#include "memory/multicast.h"
#include "memory/sharing.h"

struct mapping {
    CUdeviceptr address;
    uint64_t bytes;
    struct physical *physical;
    bool accessible;
    struct mapping *next;
};

/* Content of an exported descriptor. A fabric handle contains only `shared`. */
struct exported {
    struct shared shared;
    CUmemAllocationProp properties;
};

enum { EXPORT_MAGIC = 0x564d4d31, FABRIC_MAGIC = 0x314d4246 };

static struct physical *unused;
static struct mapping *mappings;

struct physical *fake_physical_new(int device, uint64_t bytes, uint64_t charged, const CUmemAllocationProp *how) {
    struct physical *physical = unused;
    if (physical != NULL)
        unused = physical->next_free;
    else
        physical = malloc(sizeof *physical);
    *physical = (struct physical){.magic = MAGIC_PHYSICAL,
                                  .references = 1,
                                  .lease = -1,
                                  .opened = -1,
                                  .id = fake_new_id(),
                                  .device = device,
                                  .bytes = bytes,
                                  .charged = charged,
                                  .properties = *how};
    return physical;
}

static void drop_if_unused(struct physical *physical) {
    if (physical->references > 0 || physical->mappings > 0 || physical->exports > 0)
        return;
    fake_state_close(physical->opened);
    if (physical->lease >= 0)
        close(physical->lease);
    if (physical->shared)
        fake_state_leave(physical->id);
    if (physical->charged > 0)
        fake_state_give(physical->device, FAKE_VIRTUAL, physical->charged);
    physical->magic = 0;
    fake_multicast_gone(physical);
    physical->next_free = unused;
    unused = physical;
}

/* Called when the last copy of a descriptor is closed. With fake_lock. */
static void no_longer_exported(void *of) {
    struct physical *physical = of;
    physical->exports--;
    drop_if_unused(physical);
}

void fake_physical_map(struct physical *physical) {
    physical->mappings++;
}

void fake_physical_unmap(struct physical *physical) {
    physical->mappings--;
    drop_if_unused(physical);
}

struct physical *fake_physical_held(CUmemGenericAllocationHandle handle) {
    fake_exports_settle();
    struct physical *physical = (struct physical *)(uintptr_t)handle;
    return fake_is(physical, MAGIC_PHYSICAL) && physical->references > 0 ? physical : NULL;
}

static CUresult device_of(const CUmemAllocationProp *properties, int *device) {
    *device = -1;
    switch (properties->location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE: return fake_find_device(properties->location.id, device);
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT: return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *properties,
                                              CUmemAllocationGranularity_flags option) {
    int device;
    CUresult result = fake_initialized();
    if (result == CUDA_SUCCESS && (out == NULL || properties == NULL || option > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED ||
                                   properties->type != CU_MEM_ALLOCATION_TYPE_PINNED))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        result = device_of(properties, &device);
    if (result == CUDA_SUCCESS)
        *out = PAGE_BYTES;
    return result;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *properties,
                            unsigned long long flags) {
    int device;
    CUresult result = fake_initialized();
    if (result == CUDA_SUCCESS && (out == NULL || properties == NULL || flags != 0 || bytes == 0 ||
                                   bytes % PAGE_BYTES != 0 || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        result = device_of(properties, &device);
    if (result == CUDA_SUCCESS && (properties->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC) != 0)
        result = fake_fabric_permitted();
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    if (device >= 0 && !fake_state_take(device, FAKE_VIRTUAL, bytes))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    else
        *out = (uintptr_t)fake_physical_new(device, bytes, device >= 0 ? bytes : 0, properties);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    struct physical *physical = fake_physical_held(handle);
    if (physical == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    else if (--physical->references == 0)
        drop_if_unused(physical);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr wanted,
                                    unsigned long long flags) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    if (out == NULL || bytes == 0 || bytes % PAGE_BYTES != 0 || (alignment & (alignment - 1)) != 0 || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct range range = {.bytes = bytes, .asked = bytes, .kind = RANGE_RESERVATION};
    uint64_t aligned = alignment > PAGE_BYTES ? alignment : PAGE_BYTES;
    pthread_mutex_lock(&fake_lock);
    struct range *kept = wanted % aligned == 0 ? fake_range_add(range, aligned, wanted) : NULL;
    if (kept == NULL) /* the address is only a preference */
        kept = fake_range_add(range, aligned, 0);
    *out = kept->address;
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}

static bool overlaps(const struct mapping *mapping, CUdeviceptr address, uint64_t bytes) {
    return mapping->address < address + bytes && address < mapping->address + mapping->bytes;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    struct range *range = fake_range_at(address);
    if (range == NULL || range->kind != RANGE_RESERVATION || range->bytes != bytes)
        result = CUDA_ERROR_INVALID_VALUE;
    for (struct mapping *mapping = mappings; result == CUDA_SUCCESS && mapping != NULL; mapping = mapping->next)
        if (overlaps(mapping, address, bytes))
            result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        fake_range_remove(range);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    struct physical *physical = fake_physical_held(handle);
    const struct range *range = fake_range_holding(address);
    if (physical == NULL || range == NULL || range->kind != RANGE_RESERVATION || offset != 0 || flags != 0 ||
        bytes == 0 || bytes % PAGE_BYTES != 0 || bytes > physical->bytes || address % PAGE_BYTES != 0 ||
        bytes > range->address + range->bytes - address)
        result = CUDA_ERROR_INVALID_VALUE;
    for (struct mapping *mapping = mappings; result == CUDA_SUCCESS && mapping != NULL; mapping = mapping->next)
        if (overlaps(mapping, address, bytes))
            result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        struct mapping *mapping = malloc(sizeof *mapping);
        *mapping = (struct mapping){.address = address, .bytes = bytes, .physical = physical, .next = mappings};
        mappings = mapping;
        fake_physical_map(physical);
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

/* Return the bytes of all mappings that are completely within a range. */
static uint64_t mapped_within(CUdeviceptr address, uint64_t bytes) {
    uint64_t sum = 0;
    for (const struct mapping *mapping = mappings; mapping != NULL; mapping = mapping->next)
        if (mapping->address >= address && mapping->address + mapping->bytes <= address + bytes)
            sum += mapping->bytes;
    return sum;
}

/* Unmap a range, which must consist of whole mappings. */
EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    fake_exports_settle();
    if (bytes == 0 || mapped_within(address, bytes) != bytes)
        result = CUDA_ERROR_INVALID_VALUE;
    for (struct mapping **at = &mappings; result == CUDA_SUCCESS && *at != NULL;) {
        struct mapping *mapping = *at;
        if (!overlaps(mapping, address, bytes)) {
            at = &mapping->next;
            continue;
        }
        *at = mapping->next;
        fake_physical_unmap(mapping->physical);
        free(mapping);
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    if (access == NULL || count == 0 || bytes == 0 || mapped_within(address, bytes) != bytes)
        result = CUDA_ERROR_INVALID_VALUE;
    for (struct mapping *mapping = mappings; result == CUDA_SUCCESS && mapping != NULL; mapping = mapping->next)
        if (overlaps(mapping, address, bytes))
            mapping->accessible = access[0].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE;
    pthread_mutex_unlock(&fake_lock);
    return result;
}

static struct mapping *mapping_holding(CUdeviceptr address) {
    struct mapping *mapping = mappings;
    while (mapping != NULL && !overlaps(mapping, address, 1))
        mapping = mapping->next;
    return mapping;
}

struct physical *fake_physical_at(CUdeviceptr address, uint64_t *left) {
    const struct mapping *mapping = mapping_holding(address);
    *left = mapping != NULL ? mapping->address + mapping->bytes - address : 0;
    return mapping != NULL ? mapping->physical : NULL;
}

struct physical *fake_physical_mapped(CUdeviceptr address, uint64_t bytes) {
    uint64_t left;
    struct physical *physical = fake_physical_at(address, &left);
    return bytes <= left ? physical : NULL;
}

EXPORT CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address) {
    CUresult result = fake_initialized();
    (void)location;
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    const struct mapping *mapping = mapping_holding(address);
    if (mapping == NULL || flags == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    else
        *flags = mapping->accessible ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    struct mapping *mapping = mapping_holding((CUdeviceptr)(uintptr_t)address);
    if (mapping == NULL || out == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    else {
        mapping->physical->references++;
        *out = (uintptr_t)mapping->physical;
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *out, CUmemGenericAllocationHandle handle) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    const struct physical *physical = fake_physical_held(handle);
    if (physical == NULL || out == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    else
        *out = physical->properties;
    pthread_mutex_unlock(&fake_lock);
    return result;
}

/* Create a descriptor or a fabric handle of physical memory. */
static CUresult export_physical(void *out, struct physical *physical, CUmemAllocationHandleType type) {
    bool fabric = type == CU_MEM_HANDLE_TYPE_FABRIC;
    struct exported content = {.shared = fake_describe(fabric ? FABRIC_MAGIC : EXPORT_MAGIC, physical->device),
                               .properties = physical->properties};
    content.shared.bytes = physical->bytes;
    if (physical->charged > 0) {
        if (!fake_describe_share(&content.shared, FAKE_VIRTUAL, physical->bytes, physical->id, physical->id))
            return CUDA_ERROR_OUT_OF_MEMORY;
        physical->shared = true;
    }
    if (fabric)
        return fake_describe_in_fabric(out, &content.shared);
    int fd = fake_export_open(&content, sizeof content, no_longer_exported, physical);
    if (fd < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    physical->exports++;
    *(int *)out = fd;
    return CUDA_SUCCESS;
}

static bool exportable(CUmemAllocationHandleType type) {
    return type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || type == CU_MEM_HANDLE_TYPE_FABRIC;
}

EXPORT CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle,
                                             CUmemAllocationHandleType type, unsigned long long flags) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    if (!exportable(type))
        return CUDA_ERROR_NOT_SUPPORTED;
    pthread_mutex_lock(&fake_lock);
    struct physical *physical = fake_physical_held(handle);
    if (physical == NULL || out == NULL || flags != 0 || !(physical->properties.requestedHandleTypes & type))
        result = CUDA_ERROR_INVALID_VALUE;
    else
        result = export_physical(out, physical, type);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

/* A fabric handle does not keep the memory: it is valid only while its creator has the memory. */
static CUresult import_fabric(CUmemGenericAllocationHandle *out, const void *handle) {
    struct shared shared;
    CUresult result = fake_read_from_fabric(&shared, handle);
    if (result != CUDA_SUCCESS)
        return result;
    if (shared.magic != FABRIC_MAGIC || !fake_open_shared(&shared))
        return CUDA_ERROR_INVALID_HANDLE;
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .requestedHandleTypes = CU_MEM_HANDLE_TYPE_FABRIC,
                                      .location = {CU_MEM_LOCATION_TYPE_DEVICE, {shared.device}}};
    pthread_mutex_lock(&fake_lock);
    struct physical *physical = fake_physical_new(shared.device, shared.bytes, 0, &properties);
    physical->opened = shared.place;
    *out = (uintptr_t)physical;
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *os_handle,
                                               CUmemAllocationHandleType type) {
    struct exported content;
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    if (!exportable(type))
        return CUDA_ERROR_NOT_SUPPORTED;
    if (type == CU_MEM_HANDLE_TYPE_FABRIC)
        return out == NULL ? CUDA_ERROR_INVALID_VALUE : import_fabric(out, os_handle);
    int fd = (int)(intptr_t)os_handle;
    if (out == NULL || !fake_export_read(fd, &content, sizeof content) || content.shared.magic != EXPORT_MAGIC)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    struct physical *physical = fake_physical_new(content.shared.device, content.shared.bytes, 0, &content.properties);
    if (fake_open_shared(&content.shared))
        physical->opened = content.shared.place;
    physical->lease = fake_export_lease(fd);
    *out = (uintptr_t)physical;
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}
