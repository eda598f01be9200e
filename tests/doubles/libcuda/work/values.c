/* Words of memory that streams wait for and write: cuStreamWaitValue, cuStreamWriteValue, and batches of both.
 *
 * A word in host memory is accessed directly, so the program can write and read it. Device addresses have no memory
 * behind them, so the double stores the words that streams have written there; all others are 0.
 */
#include <stdlib.h>

#include "memory/ranges.h"

enum { WORDS = 4096, ADDRESS_BITS = 56 /* bits of the largest address that a program can have */ };

static struct {
    CUdeviceptr address;
    uint64_t value;
} words[WORDS];
static unsigned count;

/* Return the address at which the double stores a word of device memory, created if necessary. */
static uint64_t *word_at(CUdeviceptr address) {
    for (unsigned i = 0; i < count; i++)
        if (words[i].address == address)
            return &words[i].value;
    if (count == WORDS)
        abort(); /* more words than any test uses */
    words[count].address = address;
    return &words[count++].value;
}

bool fake_value(const struct value *value) {
    void *host = fake_range_on_device(value->address, 4) ? NULL : (void *)(uintptr_t)value->address;
    if (value->writes) {
        if (host == NULL)
            *word_at(value->address) = value->value;
        else if (value->wide)
            __atomic_store_n((uint64_t *)host, value->value, __ATOMIC_RELEASE);
        else
            __atomic_store_n((uint32_t *)host, (uint32_t)value->value, __ATOMIC_RELEASE);
        return true;
    }
    uint64_t is = host == NULL  ? *word_at(value->address)
                  : value->wide ? __atomic_load_n((uint64_t *)host, __ATOMIC_ACQUIRE)
                                : __atomic_load_n((uint32_t *)host, __ATOMIC_ACQUIRE);
    switch (value->flags & 3) {
    case CU_STREAM_WAIT_VALUE_GEQ:
        return value->wide ? (int64_t)(is - value->value) >= 0 : (int32_t)(is - value->value) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ: return is == value->value;
    case CU_STREAM_WAIT_VALUE_AND: return (is & value->value) != 0;
    default: return ~(is | value->value) << (value->wide ? 0 : 32) != 0;
    }
}

static CUresult submit(CUstream handle, struct value value) {
    struct stream *stream;
    CUresult result = fake_enter_stream(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (value.address == 0 || value.address >> ADDRESS_BITS != 0 || value.address % (value.wide ? 8 : 4) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    result = fake_not_captured(stream);
    if (result == CUDA_SUCCESS)
        result = fake_order_call(stream);
    if (result == CUDA_SUCCESS) {
        struct op op = {.kind = OP_VALUE, .value = malloc(sizeof value)};
        *op.value = value;
        fake_submit(stream, op);
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

EXPORT CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
    return submit(stream, (struct value){.address = address, .value = value, .flags = flags});
}

EXPORT CUresult cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int flags) {
    return submit(stream, (struct value){.address = address, .value = value, .flags = flags, .wide = true});
}

EXPORT CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
    return submit(stream, (struct value){.address = address, .value = value, .flags = flags, .writes = true});
}

EXPORT CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int flags) {
    return submit(stream,
                  (struct value){.address = address, .value = value, .flags = flags, .wide = true, .writes = true});
}

EXPORT CUresult cuStreamBatchMemOp_v2(CUstream stream, unsigned int ops, CUstreamBatchMemOpParams *list,
                                      unsigned int flags) {
    CUresult result = list == NULL || flags != 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    for (unsigned i = 0; i < ops && result == CUDA_SUCCESS; i++) {
        struct value value = {0};
        switch (list[i].operation) {
        case CU_STREAM_MEM_OP_WRITE_VALUE_32:
        case CU_STREAM_MEM_OP_WRITE_VALUE_64: value.writes = true; __attribute__((fallthrough));
        case CU_STREAM_MEM_OP_WAIT_VALUE_32:
        case CU_STREAM_MEM_OP_WAIT_VALUE_64:
            value.wide = list[i].operation == CU_STREAM_MEM_OP_WRITE_VALUE_64 ||
                         list[i].operation == CU_STREAM_MEM_OP_WAIT_VALUE_64;
            value.address = list[i].waitValue.address; /* at the same offset in both kinds */
            value.value = value.wide ? list[i].waitValue.value64 : list[i].waitValue.value;
            value.flags = list[i].waitValue.flags;
            result = submit(stream, value);
            break;
        case CU_STREAM_MEM_OP_BARRIER:
        case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES: break;
        default: result = CUDA_ERROR_INVALID_VALUE;
        }
    }
    return result;
}
