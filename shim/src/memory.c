/* See memory.h. */
#include "memory.h"

#include "allocations.h"
#include "entries.h"
#include "process.h"

#ifndef SHAREPOD_MEMORY_WAIT_MS
#define SHAREPOD_MEMORY_WAIT_MS 30000 /* how long an allocation waits for a daemon that is away */
#endif

enum { GRANULARITY = 512 };
#define CREDIT_STEP                                                                                                 \
    (2ull << 20)                /* credits are asked for in multiples of this, so that small allocations seldom ask \
                                 */
#define IDLE_MOST (32ull << 20) /* idle credits beyond this go back at once */

static uint64_t rounded(uint64_t bytes, uint64_t step) {
    return bytes > UINT64_MAX - step ? UINT64_MAX / step * step : (bytes + step - 1) / step * step;
}

/* Takes `bytes` from the credits in hand. With the lock. */
static bool take(struct gpu *gpu, uint64_t bytes) {
    if (gpu->credited - gpu->used < bytes)
        return false;
    gpu->used += bytes;
    return true;
}

/* Reserves bytes of a GPU: from the credits in hand, else from the daemon. */
static bool reserve(int place, uint64_t bytes) {
    struct process *process = the_process;
    struct gpu *gpu = &process->gpus.gpus[place];
    uint64_t deadline = sys_now() + SHAREPOD_MEMORY_WAIT_MS * SYS_MS;
    bool exact = false;
    for (;;) {
        lock(&process->gpus.lock);
        bool taken = take(gpu, bytes), enforced = gpu->enforced;
        uint64_t missing = taken ? 0 : bytes - (gpu->credited - gpu->used);
        if (!taken && !enforced && gpu->wire < 0) { /* counted, never refused: the daemon hears of it when it is back */
            gpu->credited += missing;
            taken = take(gpu, bytes);
        }
        bool hopeless = enforced && bytes > gpu->memory;
        unlock(&process->gpus.lock);
        if (taken)
            return true;
        uint64_t now = sys_now();
        if (hopeless || now >= deadline)
            return false;
        struct answer answer = session_ask(&process->session, SHP_RESERVE, place,
                                           exact ? missing : rounded(missing, CREDIT_STEP), deadline - now);
        /* Credits that came are in hand by now: another thread may be faster, then ask again. */
        if (answer.came && answer.status != SHP_RESERVE_OK) {
            if (exact) { /* unless another thread has freed some meanwhile */
                lock(&process->gpus.lock);
                taken = take(gpu, bytes);
                unlock(&process->gpus.lock);
                return taken;
            }
            exact = true;
        }
    }
}

/* Returns used bytes to the credits in hand, and what is too much of these to the daemon. */
static void unreserve(int place, uint64_t bytes) {
    struct process *process = the_process;
    struct gpu *gpu = &process->gpus.gpus[place];
    lock(&process->gpus.lock);
    gpu->used -= bytes;
    uint64_t idle = gpu->credited - gpu->used;
    if (idle > IDLE_MOST) {
        gpu->credited -= idle;
        if (!session_release(&process->session, place, idle, 0))
            gpu->credited += gpu->wire < 0 ? 0 : idle; /* disconnected: the daemon has forgotten them anyway */
    }
    unlock(&process->gpus.lock);
}

uint64_t memory_recall(int place, uint64_t bytes) {
    struct gpu *gpu = &the_process->gpus.gpus[place];
    uint64_t idle = gpu->credited - gpu->used, given = idle < bytes ? idle : bytes;
    gpu->credited -= given;
    return given;
}

/* The place of the current context's GPU. */
static CUresult current_place(int *place) {
    CUdevice device;
    CUresult result = process_enter();
    if (result == CUDA_SUCCESS)
        result = HAS(cuCtxGetDevice) ? DRIVER(cuCtxGetDevice)(&device) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS)
        *place = gpus_place(&the_process->gpus, device);
    return result;
}

/* An allocation on its way: reserved, to be made by the driver, then kept or rolled back. */
struct pending {
    int place;
    uint64_t bytes;
    bool untracked; /* zero bytes: the driver shall say what is wrong with it */
};

static CUresult begin_allocation(struct pending *pending, uint64_t bytes) {
    *pending = (struct pending){.bytes = rounded(bytes, GRANULARITY), .untracked = bytes == 0};
    CUresult result = current_place(&pending->place);
    if (result != CUDA_SUCCESS || pending->untracked)
        return result;
    if (pending->place < 0 && gpus_ungated(&the_process->gpus)) {
        pending->untracked = true;
        return CUDA_SUCCESS;
    }
    if (pending->place < 0) /* a GPU that is none of the tenant's: its limit there is 0 */
        return CUDA_ERROR_OUT_OF_MEMORY;
    return reserve(pending->place, pending->bytes) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static void end_allocation(const struct pending *pending, bool made, CUdeviceptr address) {
    struct process *process = the_process;
    CUcontext context = NULL;
    if (pending->untracked)
        return;
    if (!made) {
        unreserve(pending->place, pending->bytes);
        return;
    }
    DRIVER(cuCtxGetCurrent)(&context);
    lock(&process->gpus.lock);
    if (allocations_grow(&process->memory)) /* without room it stays reserved for good: the limit holds */
        allocations_add(&process->memory, (struct allocation){address, context, pending->bytes, pending->place});
    unlock(&process->gpus.lock);
}

#define ALLOCATE(symbol, bytes, address, ...)                                                \
    struct pending pending;                                                                  \
    CUresult result = begin_allocation(&pending, bytes);                                     \
    if (result != CUDA_SUCCESS)                                                              \
        return result;                                                                       \
    result = HAS(symbol) ? DRIVER(symbol)(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND;               \
    end_allocation(&pending, result == CUDA_SUCCESS, result == CUDA_SUCCESS ? *address : 0); \
    return result

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
    ALLOCATE(cuMemAlloc_v2, bytes, address, address, bytes);
}

EXPORT CUresult cuMemAlloc(CUdeviceptr_v1 *address, unsigned int bytes) {
    ALLOCATE(cuMemAlloc, bytes, address, address, bytes);
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned int flags) {
    ALLOCATE(cuMemAllocManaged, bytes, address, address, bytes, flags);
}

/* The driver chooses the pitch. Reserved is what its largest alignment would need. */
static uint64_t pitched(uint64_t width, uint64_t height) {
    uint64_t pitch = rounded(width, GRANULARITY);
    return height != 0 && pitch > UINT64_MAX / height ? UINT64_MAX / 2 : pitch * height;
}

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height,
                                   unsigned int element) {
    ALLOCATE(cuMemAllocPitch_v2, pitched(width, height), address, address, pitch, width, height, element);
}

EXPORT CUresult cuMemAllocPitch(CUdeviceptr_v1 *address, unsigned *pitch, unsigned width, unsigned height,
                                unsigned element) {
    ALLOCATE(cuMemAllocPitch, pitched(width, height), address, address, pitch, width, height, element);
}

/* Taken out of the table before the driver frees it: the address may be given to another thread at once. */
static bool begin_free(CUdeviceptr address, struct allocation *allocation) {
    struct process *process = the_process;
    if (process == NULL)
        return false;
    lock(&process->gpus.lock);
    bool ours = allocations_take(&process->memory, address, allocation);
    unlock(&process->gpus.lock);
    return ours;
}

static void end_free(bool ours, const struct allocation *allocation, bool freed) {
    struct process *process = the_process;
    if (!ours)
        return;
    if (freed) {
        unreserve(allocation->gpu, allocation->bytes);
        return;
    }
    lock(&process->gpus.lock);
    if (allocations_grow(&process->memory))
        allocations_add(&process->memory, *allocation);
    unlock(&process->gpus.lock);
}

#define FREE(symbol, address)                                              \
    struct allocation allocation;                                          \
    CUresult result = process_enter();                                     \
    if (result != CUDA_SUCCESS)                                            \
        return result;                                                     \
    bool ours = begin_free(address, &allocation);                          \
    result = HAS(symbol) ? DRIVER(symbol)(address) : CUDA_ERROR_NOT_FOUND; \
    end_free(ours, &allocation, result == CUDA_SUCCESS);                   \
    return result

EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
    FREE(cuMemFree_v2, address);
}

EXPORT CUresult cuMemFree(CUdeviceptr_v1 address) {
    FREE(cuMemFree, address);
}

void memory_rename_context(CUcontext from, CUcontext to) {
    struct process *process = the_process;
    lock(&process->gpus.lock);
    for (size_t i = 0; i < process->memory.capacity; i++)
        if (process->memory.table[i].address != 0 && process->memory.table[i].context == from)
            process->memory.table[i].context = to;
    unlock(&process->gpus.lock);
}

void memory_forget_context(CUcontext context) {
    struct process *process = the_process;
    uint64_t freed[SHP_MAX_GPUS] = {0};
    lock(&process->gpus.lock);
    for (size_t i = 0; i < process->memory.capacity; i++) {
        struct allocation allocation;
        while (process->memory.table[i].address != 0 && process->memory.table[i].context == context) {
            allocations_take(&process->memory, process->memory.table[i].address,
                             &allocation); /* may move another one here */
            freed[allocation.gpu] += allocation.bytes;
        }
    }
    unlock(&process->gpus.lock);
    for (int place = 0; place < SHP_MAX_GPUS; place++)
        if (freed[place] > 0)
            unreserve(place, freed[place]);
}

/* The tenant's view of a GPU's memory, never more than what the driver says. */
static void clip(int place, uint64_t *free_bytes, uint64_t *total) {
    struct process *process = the_process;
    if (place < 0 && gpus_ungated(&process->gpus))
        return;
    if (place < 0) {
        if (free_bytes != NULL)
            *free_bytes = 0;
        if (total != NULL)
            *total = 0;
        return;
    }
    struct gpu *gpu = &process->gpus.gpus[place];
    struct answer answer = {0};
    lock(&process->gpus.lock);
    bool enforced = gpu->enforced;
    uint64_t limit = gpu->memory, used = gpu->used, idle = gpu->credited - gpu->used;
    unlock(&process->gpus.lock);
    if (!enforced)
        return;
    if (free_bytes != NULL)
        answer = session_ask(&process->session, SHP_MEMINFO, place, idle, SYS_SECOND);
    if (answer.came) {
        limit = answer.limit;
        used = answer.used;
    }
    if (total != NULL && *total > limit)
        *total = limit;
    uint64_t left = limit > used ? limit - used : 0;
    if (free_bytes != NULL && *free_bytes > left)
        *free_bytes = left;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    int place;
    CUresult result = current_place(&place);
    if (result == CUDA_SUCCESS)
        result = HAS(cuMemGetInfo_v2) ? DRIVER(cuMemGetInfo_v2)(free_bytes, total) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS)
        clip(place, free_bytes, total);
    return result;
}

static unsigned saturated(uint64_t value) {
    return value > UINT32_MAX ? UINT32_MAX : (unsigned)value;
}

EXPORT CUresult cuMemGetInfo(unsigned *free_bytes, unsigned *total) {
    int place;
    CUresult result = current_place(&place);
    if (result == CUDA_SUCCESS)
        result = HAS(cuMemGetInfo) ? DRIVER(cuMemGetInfo)(free_bytes, total) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS) {
        uint64_t wide_free = free_bytes ? *free_bytes : 0, wide_total = total ? *total : 0;
        clip(place, &wide_free, &wide_total);
        if (free_bytes != NULL)
            *free_bytes = saturated(wide_free);
        if (total != NULL)
            *total = saturated(wide_total);
    }
    return result;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    CUresult result = process_enter();
    if (result == CUDA_SUCCESS)
        result = HAS(cuDeviceTotalMem_v2) ? DRIVER(cuDeviceTotalMem_v2)(bytes, device) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS)
        clip(gpus_place(&the_process->gpus, device), NULL, bytes);
    return result;
}

EXPORT CUresult cuDeviceTotalMem(unsigned *bytes, CUdevice device) {
    CUresult result = process_enter();
    if (result == CUDA_SUCCESS)
        result = HAS(cuDeviceTotalMem) ? DRIVER(cuDeviceTotalMem)(bytes, device) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS && bytes != NULL) {
        uint64_t wide = *bytes;
        clip(gpus_place(&the_process->gpus, device), NULL, &wide);
        *bytes = saturated(wide);
    }
    return result;
}
