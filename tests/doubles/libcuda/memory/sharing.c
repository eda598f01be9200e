/* Memory of other processes: CUDA IPC, exported pools and their allocations, and external memory (of Vulkan, for
 * example).
 *
 * The memory counts to the process that created it. Opening or importing it takes nothing. A handle is valid in other
 * processes while its creator runs and has the memory. If the creator frees memory that another process has open, or
 * ends, the memory stays taken until it is closed, because NVIDIA's kernel module counts references. CUDA documents
 * less: importers must close the memory first.
 */
#include "memory/sharing.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "memory/array.h"
#include "memory/memory.h"
#include "memory/pool.h"

_Static_assert(sizeof(struct shared) <= CU_IPC_HANDLE_SIZE, "fits into a handle of IPC");
_Static_assert(sizeof(struct shared) <= sizeof(CUmemPoolPtrExportData), "fits into a pointer's data");
_Static_assert(sizeof(struct shared) <= sizeof(CUmemFabricHandle), "fits into a handle of the fabric");

enum { IPC_MAGIC = 0x31435049, POOL_MAGIC = 0x314c4f50, POINTER_MAGIC = 0x31525450 };

/* CUDA IPC handle that a context has opened, with the number of opens. */
struct opened {
    struct shared what;
    struct range *range;
    unsigned references;
    struct opened *next;
};

struct external {
    unsigned magic;
    uint64_t bytes;
};

static struct opened *openings;

struct shared fake_describe(uint64_t magic, int device) {
    struct shared shared = {.magic = magic, .device = device, .place = -1};
    fake_state_self(&shared.client, &shared.pid);
    return shared;
}

bool fake_describe_share(struct shared *shared, enum fake_kind kind, uint64_t bytes, uint64_t id, uint64_t group) {
    shared->bytes = bytes;
    shared->id = id;
    shared->place = fake_state_share(shared->device, kind, bytes, id, group);
    return shared->place >= 0;
}

bool fake_open_shared(const struct shared *shared) {
    return fake_state_open(shared->place, shared->client, shared->pid, shared->id);
}

static bool someone_elses(const struct shared *shared, uint64_t magic) {
    uint32_t client, pid;
    fake_state_self(&client, &pid);
    return shared->magic == magic && client != shared->client && fake_state_lives(shared->client, shared->pid);
}

int fake_describe_in_file(const void *content, size_t bytes) {
    int fd = memfd_create("fakecuda", MFD_CLOEXEC);
    if (fd >= 0 && write(fd, content, bytes) == (ssize_t)bytes)
        return fd;
    if (fd >= 0)
        close(fd);
    return -1;
}

/* A container has an IMEX channel only if one is assigned to it. */
CUresult fake_fabric_permitted(void) {
    const char *value = getenv("FAKE_CUDA_IMEX");
    return value != NULL && strcmp(value, "1") == 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_PERMITTED;
}

CUresult fake_describe_in_fabric(void *out, const struct shared *shared) {
    CUresult result = fake_fabric_permitted();
    if (result != CUDA_SUCCESS)
        return result;
    memset(out, 0, sizeof(CUmemFabricHandle));
    memcpy(out, shared, sizeof *shared);
    return CUDA_SUCCESS;
}

CUresult fake_read_from_fabric(struct shared *shared, const void *handle) {
    CUresult result = fake_fabric_permitted();
    if (result == CUDA_SUCCESS && handle == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        memcpy(shared, handle, sizeof *shared);
    return result;
}

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr address) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    struct range *range = fake_range_holding(address);
    struct shared shared = fake_describe(IPC_MAGIC, range == NULL ? 0 : range->device);
    if (out == NULL || range == NULL || range->kind != RANGE_LINEAR) {
        result = CUDA_ERROR_INVALID_VALUE;
    } else if (!fake_describe_share(&shared, FAKE_LINEAR, range->bytes, range->id, range->id)) {
        result = CUDA_ERROR_OUT_OF_MEMORY;
    } else {
        range->shared = true;
        shared.address = range->address;
        shared.asked = range->asked;
        memset(out, 0, sizeof *out);
        memcpy(out, &shared, sizeof shared);
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

static void close_opening(struct opened **at) {
    struct opened *opened = *at;
    *at = opened->next;
    fake_state_close(opened->what.place);
    fake_range_remove(opened->range);
    free(opened);
}

void fake_sharing_of_context_gone(struct context *context) {
    for (struct opened **at = &openings; *at != NULL;)
        if ((*at)->range->context == context)
            close_opening(at);
        else
            at = &(*at)->next;
    for (struct range *range; (range = fake_range_of_context(context, RANGE_EXTERNAL)) != NULL;)
        fake_range_remove(range);
}

/* Open a handle in a context. NULL: the process that created the memory has freed it. */
static struct opened *open_handle(const struct shared *shared, struct context *context) {
    struct opened *opened = openings;
    while (opened != NULL && (opened->range->context != context || memcmp(&opened->what, shared, sizeof *shared) != 0))
        opened = opened->next;
    if (opened == NULL) {
        if (!fake_open_shared(shared))
            return NULL;
        struct range range = {.bytes = shared->bytes,
                              .asked = shared->asked,
                              .kind = RANGE_IPC,
                              .device = shared->device,
                              .context = context};
        opened = malloc(sizeof *opened);
        *opened = (struct opened){.what = *shared, .range = fake_range_add(range, GRANULARITY, 0), .next = openings};
        openings = opened;
    }
    opened->references++;
    return opened;
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle handle, unsigned int flags) {
    struct context *context;
    struct shared shared;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    memcpy(&shared, &handle, sizeof shared);
    if (out == NULL || (flags & ~(unsigned)CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) != 0 || shared.magic != IPC_MAGIC)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    if (someone_elses(&shared, IPC_MAGIC)) {
        const struct opened *opened = open_handle(&shared, context);
        if (opened != NULL)
            *out = opened->range->address;
        else
            result = CUDA_ERROR_MAP_FAILED;
    } else {
        result = CUDA_ERROR_INVALID_CONTEXT;
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr *out, CUipcMemHandle handle, unsigned int flags) {
    return cuIpcOpenMemHandle_v2(out, handle, flags);
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    struct opened **at = &openings;
    while (*at != NULL && (*at)->range->address != address)
        at = &(*at)->next;
    if (*at == NULL)
        result = CUDA_ERROR_INVALID_VALUE;
    else if (--(*at)->references == 0)
        close_opening(at);
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuMemPoolExportToShareableHandle(void *out, CUmemoryPool handle, CUmemAllocationHandleType type,
                                                 unsigned long long flags) {
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && type != CU_MEM_HANDLE_TYPE_FABRIC)
        return CUDA_ERROR_NOT_SUPPORTED;
    pthread_mutex_lock(&fake_lock);
    const struct pool *pool = fake_pool_of(handle);
    bool exports = out != NULL && flags == 0 && pool != NULL && (pool->handles & type) != 0;
    struct shared shared = fake_describe(POOL_MAGIC, pool == NULL ? 0 : pool->device);
    pthread_mutex_unlock(&fake_lock);
    if (!exports)
        return CUDA_ERROR_INVALID_VALUE;
    if (type == CU_MEM_HANDLE_TYPE_FABRIC)
        return fake_describe_in_fabric(out, &shared);
    int fd = fake_describe_in_file(&shared, sizeof shared);
    if (fd >= 0)
        *(int *)out = fd;
    return fd >= 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

EXPORT CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *out, void *handle, CUmemAllocationHandleType type,
                                                   unsigned long long flags) {
    struct shared shared;
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && type != CU_MEM_HANDLE_TYPE_FABRIC)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (out == NULL || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (type == CU_MEM_HANDLE_TYPE_FABRIC)
        result = fake_read_from_fabric(&shared, handle);
    else if (pread((int)(intptr_t)handle, &shared, sizeof shared, 0) != (ssize_t)sizeof shared)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS || !someone_elses(&shared, POOL_MAGIC))
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    struct pool *pool = fake_pool_new(shared.device, 0, true);
    pool->imported = true;
    *out = (CUmemoryPool)pool;
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData *out, CUdeviceptr address) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    const struct range *range = fake_range_at(address);
    struct pool *pool = range != NULL && range->kind == RANGE_POOL ? range->object : NULL;
    struct shared shared = fake_describe(POINTER_MAGIC, range == NULL ? 0 : range->device);
    if (out == NULL || pool == NULL || pool->handles == CU_MEM_HANDLE_TYPE_NONE) {
        result = CUDA_ERROR_INVALID_VALUE;
    } else if (!fake_describe_share(&shared, FAKE_POOL, range->bytes, range->id, pool->id)) {
        result = CUDA_ERROR_OUT_OF_MEMORY;
    } else {
        pool->shared = true;
        shared.address = range->address;
        shared.asked = range->asked;
        memset(out, 0, sizeof *out);
        memcpy(out, &shared, sizeof shared);
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

/* The program frees imported memory like any allocation of a pool. No device memory is freed by that. */
EXPORT CUresult cuMemPoolImportPointer(CUdeviceptr *out, CUmemoryPool handle, CUmemPoolPtrExportData *content) {
    struct context *context;
    struct shared shared;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&fake_lock);
    struct pool *pool = fake_pool_of(handle);
    if (content != NULL)
        memcpy(&shared, content, sizeof shared);
    if (out == NULL || content == NULL || pool == NULL || !pool->imported || !someone_elses(&shared, POINTER_MAGIC) ||
        !fake_open_shared(&shared)) {
        result = CUDA_ERROR_INVALID_VALUE;
    } else {
        pool->used += shared.bytes;
        *out = fake_range_add((struct range){.bytes = shared.bytes,
                                             .asked = shared.asked,
                                             .kind = RANGE_POOL,
                                             .device = shared.device,
                                             .context = context,
                                             .object = pool,
                                             .opened = shared.place},
                              GRANULARITY, 0)
                   ->address;
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

/* On success the descriptor belongs to the driver, which closes it. */
EXPORT CUresult cuImportExternalMemory(CUexternalMemory *out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *what) {
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (out == NULL || what == NULL || what->size == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (what->type != CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (close(what->handle.fd) != 0)
        return CUDA_ERROR_INVALID_HANDLE;
    struct external *external = malloc(sizeof *external);
    *external = (struct external){MAGIC_EXTERNAL, what->size};
    *out = (CUexternalMemory)external;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuExternalMemoryGetMappedBuffer(CUdeviceptr *out, CUexternalMemory handle,
                                                const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *what) {
    const struct external *external = (const struct external *)handle;
    struct context *context;
    CUresult result = fake_enter(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!fake_is(external, MAGIC_EXTERNAL))
        return CUDA_ERROR_INVALID_HANDLE;
    if (out == NULL || what == NULL || what->flags != 0 || what->size == 0 || what->offset > external->bytes ||
        what->size > external->bytes - what->offset)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    *out = fake_range_add((struct range){.bytes = what->size,
                                         .asked = what->size,
                                         .kind = RANGE_EXTERNAL,
                                         .device = context->device,
                                         .context = context},
                          GRANULARITY, 0)
               ->address;
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuExternalMemoryGetMappedMipmappedArray(CUmipmappedArray *out, CUexternalMemory handle,
                                                        const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC *what) {
    if (!fake_is(handle, MAGIC_EXTERNAL))
        return CUDA_ERROR_INVALID_HANDLE;
    return what == NULL ? CUDA_ERROR_INVALID_VALUE : fake_mipmap_elsewhere(out, &what->arrayDesc, what->numLevels);
}

/* A buffer mapped from external memory stays until it is freed. */
EXPORT CUresult cuDestroyExternalMemory(CUexternalMemory handle) {
    struct external *external = (struct external *)handle;
    if (!fake_is(external, MAGIC_EXTERNAL))
        return CUDA_ERROR_INVALID_HANDLE;
    external->magic = 0;
    free(external);
    return CUDA_SUCCESS;
}
