/* Wrapped copies, memsets, moves of managed memory, and decompression by the device. moves.def lists them all.
 *
 * A copy between device memories passes the gate, and so does a move to a device. A copy from or to the host bypasses
 * the gate, because it does not occupy the multiprocessors. So a program can load its next batch while it waits for its
 * turn. Memsets pass the gate, whatever memory they fill, because they are kernels of the driver.
 *
 * If a call does not show whether its addresses are device memory, the hook queries the driver, once per page (C12,
 * kinds.h). An address that the driver does not know is pageable host memory.
 */
#include "wrappers/work/passthrough.h"
#include "time/streams.h"

/* Return whether an address is known to be host memory, without a driver call. */
static bool known_host(uint64_t age, CUdeviceptr address) {
    return kinds_find(&memory_state()->kinds, age, address) == ADDRESS_HOST;
}

static bool on_device(uint64_t age, CUdeviceptr address) {
    unsigned int type = 0;
    enum address_kind kind = kinds_find(&memory_state()->kinds, age, address);
    if (kind != ADDRESS_UNKNOWN || !HAS(cuPointerGetAttribute))
        return kind != ADDRESS_HOST;
    CUstreamCaptureMode mode = own_calls_begin();
    CUresult result = DRIVER(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address);
    bool device = result == CUDA_SUCCESS && type != CU_MEMORYTYPE_HOST;
    own_calls_end(mode);
    if (result == CUDA_SUCCESS || result == CUDA_ERROR_INVALID_VALUE) /* any other error is not about the address */
        kinds_note(&memory_state()->kinds, age, address, device ? ADDRESS_DEVICE : ADDRESS_HOST);
    return device;
}

/* Return true if both addresses are device memory. Calls the driver only if the cache has no answer. */
static bool both_on_device(uint64_t age, CUdeviceptr to, CUdeviceptr from) {
    return !known_host(age, to) && on_device(age, from) && on_device(age, to);
}

static uint64_t present_age(void) {
    return kinds_age(&memory_state()->kinds);
}

/* Return true if a stream capture records the call, which then runs nothing. The query invalidates no capture (R3,
 * streams.h). */
static bool captured(CUstream stream, bool per_thread) {
    return atomic_load(&the_process->gate.captures) > 0 && stream_is_capturing(stream, per_thread);
}

/* Return true if a copy runs now, and both its addresses are device memory. */
static bool between(CUdeviceptr to, CUdeviceptr from, CUstream stream, bool per_thread) {
    return !captured(stream, per_thread) && both_on_device(present_age(), to, from);
}

/* Return whether a batch contains a copy between device memories; the whole batch then passes the gate. The driver
 * refuses a batch with an address of 0. Entries after such an address are not read, because the arrays may end there.
 */
static bool batch_between(const CUdeviceptr *to, const CUdeviceptr *from, size_t count, CUstream stream,
                          bool per_thread) {
    if (to == NULL || from == NULL || captured(stream, per_thread))
        return false;
    bool runs = false;
    uint64_t age = present_age();
    for (size_t i = 0; i < count && !runs && to[i] != 0 && from[i] != 0; i++)
        runs = both_on_device(age, to[i], from[i]);
    return runs;
}

static bool operand_on_device(uint64_t age, const CUmemcpy3DOperand *operand) {
    return operand->type == CU_MEMCPY_OPERAND_TYPE_ARRAY || on_device(age, operand->op.ptr.ptr);
}

/* Return whether the driver refuses an operand, and so the whole batch. Entries after such an operand are not read,
 * because the array may end there. */
static bool operand_missing(const CUmemcpy3DOperand *operand) {
    return operand->type == CU_MEMCPY_OPERAND_TYPE_ARRAY ? operand->op.array.array == NULL : operand->op.ptr.ptr == 0;
}

static bool operands_between(const CUDA_MEMCPY3D_BATCH_OP *copies, size_t count, CUstream stream, bool per_thread) {
    if (copies == NULL || captured(stream, per_thread))
        return false;
    bool runs = false;
    uint64_t age = present_age();
    for (size_t i = 0; i < count && !runs && !operand_missing(&copies[i].dst) && !operand_missing(&copies[i].src); i++)
        runs = operand_on_device(age, &copies[i].dst) && operand_on_device(age, &copies[i].src);
    return runs;
}

static bool side_on_device(uint64_t age, CUmemorytype type, CUdeviceptr unified) {
    return type == CU_MEMORYTYPE_UNIFIED ? on_device(age, unified) : type != CU_MEMORYTYPE_HOST;
}

static bool described_between(CUmemorytype to, CUdeviceptr to_address, CUmemorytype from, CUdeviceptr from_address,
                              CUstream stream, bool per_thread) {
    if (captured(stream, per_thread))
        return false;
    uint64_t age = present_age();
    return side_on_device(age, to, to_address) && side_on_device(age, from, from_address);
}

/* True if a copy with a descriptor (CUDA_MEMCPY2D ...) runs now, between device memories. `copy` NULL: the driver
 * reports the error. */
#define DESCRIBED(copy, stream, per_thread)                                                               \
    ((copy) != NULL && described_between((copy)->dstMemoryType, (copy)->dstDevice, (copy)->srcMemoryType, \
                                         (copy)->srcDevice, stream, per_thread))

/* Return whether any of the locations is a device. */
static bool any_device(const CUmemLocation *locations, size_t count) {
    for (size_t i = 0; locations != NULL && i < count; i++)
        if (locations[i].type == CU_MEM_LOCATION_TYPE_DEVICE)
            return true;
    return false;
}

#define MOVE(runs, symbol, stream, per_thread, parameters, ...)     \
    EXPORT CUresult symbol parameters {                             \
        PASSTHROUGH(runs, symbol, stream, per_thread, __VA_ARGS__); \
    }

#include "wrappers/work/moves.def"
