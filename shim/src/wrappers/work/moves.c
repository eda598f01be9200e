/* The wrapped copies, memsets and moves of managed memory, and decompression by the device: moves.def has them all.
 *
 * A copy between device memories passes the gate, and so does a move to a device. A copy from or to the host does not:
 * it takes no time of the multiprocessors, and a program may load its next batch while it waits for the token. Memsets
 * are kernels of the driver's own, whatever memory they fill.
 *
 * Where the call itself does not say which it is, the driver is asked what the pointers are. A pointer that the driver
 * does not know is pageable host memory.
 */
#include "wrappers/work/passthrough.h"
#include "time/streams.h"

static bool on_device(CUdeviceptr address) {
    unsigned int type = 0;
    if (!HAS(cuPointerGetAttribute))
        return true;
    return DRIVER(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) == CUDA_SUCCESS &&
           type != CU_MEMORYTYPE_HOST;
}

/* Return whether a capture records the call: then it runs nothing. No capture elsewhere is disturbed (R3). */
static bool captured(CUstream stream, bool per_thread) {
    return atomic_load(&the_process->gate.captures) > 0 && stream_is_capturing(stream, per_thread);
}

/* Return whether a copy of addresses runs between device memories. */
static bool between(CUdeviceptr to, CUdeviceptr from, CUstream stream, bool per_thread) {
    if (captured(stream, per_thread))
        return false;
    CUstreamCaptureMode mode = own_calls_begin();
    bool runs = on_device(to) && on_device(from);
    own_calls_end(mode);
    return runs;
}

/* Return whether a batch has a copy between device memories: one makes the batch wait. The driver refuses a batch with
 * an address of 0, behind which there may be no more. */
static bool batch_between(const CUdeviceptr *to, const CUdeviceptr *from, size_t count, CUstream stream,
                          bool per_thread) {
    if (to == NULL || from == NULL || captured(stream, per_thread))
        return false;
    bool runs = false;
    CUstreamCaptureMode mode = own_calls_begin();
    for (size_t i = 0; i < count && !runs && to[i] != 0 && from[i] != 0; i++)
        runs = on_device(to[i]) && on_device(from[i]);
    own_calls_end(mode);
    return runs;
}

static bool operand_on_device(const CUmemcpy3DOperand *operand) {
    return operand->type == CU_MEMCPY_OPERAND_TYPE_ARRAY || on_device(operand->op.ptr.ptr);
}

/* Return whether the driver refuses an operand, and with it a batch, behind which there may be no more. */
static bool operand_missing(const CUmemcpy3DOperand *operand) {
    return operand->type == CU_MEMCPY_OPERAND_TYPE_ARRAY ? operand->op.array.array == NULL : operand->op.ptr.ptr == 0;
}

static bool operands_between(const CUDA_MEMCPY3D_BATCH_OP *copies, size_t count, CUstream stream, bool per_thread) {
    if (copies == NULL || captured(stream, per_thread))
        return false;
    bool runs = false;
    CUstreamCaptureMode mode = own_calls_begin();
    for (size_t i = 0; i < count && !runs && !operand_missing(&copies[i].dst) && !operand_missing(&copies[i].src); i++)
        runs = operand_on_device(&copies[i].dst) && operand_on_device(&copies[i].src);
    own_calls_end(mode);
    return runs;
}

static bool side_on_device(CUmemorytype type, CUdeviceptr unified) {
    return type == CU_MEMORYTYPE_UNIFIED ? on_device(unified) : type != CU_MEMORYTYPE_HOST;
}

static bool described_between(CUmemorytype to, CUdeviceptr to_address, CUmemorytype from, CUdeviceptr from_address,
                              CUstream stream, bool per_thread) {
    if (captured(stream, per_thread))
        return false;
    CUstreamCaptureMode mode = own_calls_begin();
    bool runs = side_on_device(to, to_address) && side_on_device(from, from_address);
    own_calls_end(mode);
    return runs;
}

/* The same of a copy with a descriptor; without one the driver shall say what is wrong. */
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
