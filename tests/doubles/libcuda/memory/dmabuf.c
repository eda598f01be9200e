/* Descriptors of address ranges (dma-buf). Memory stays taken until the last copy of a descriptor is closed, in any
 * process, even if the program has freed the memory or its context has ended.
 *
 * As with a real driver, a range is within one allocation of cuMemAlloc, or is completely mapped.
 */
#include "memory/dmabuf.h"

#include <stdlib.h>

#include "memory/exported.h"
#include "memory/virtual.h"

enum { HOST_PAGE = 4096, DMABUF_MAGIC = 0x31464244 };

/* Linear memory that was exported as one or more descriptors. */
struct described {
    unsigned descriptors;
    struct range freed; /* copy of the range, made when the program freed it; 0 bytes: not freed yet */
};

/* Memory of one descriptor: linear memory, or the physical memory of one or more mappings. */
struct dmabuf {
    struct described *linear;
    size_t count;
    struct physical *pieces[];
};

bool fake_dmabuf_keeps(struct range *range) {
    struct described *described = range->object;
    if (described == NULL)
        return false;
    fake_exports_settle();
    if (described->descriptors > 0) {
        described->freed = *range;
        return true;
    }
    free(described);
    return false;
}

static void over(void *of) {
    struct dmabuf *dmabuf = of;
    struct described *linear = dmabuf->linear;
    for (size_t i = 0; i < dmabuf->count; i++)
        fake_physical_unmap(dmabuf->pieces[i]);
    if (linear != NULL && --linear->descriptors == 0 && linear->freed.bytes > 0) {
        if (linear->freed.shared)
            fake_state_leave(linear->freed.id);
        fake_state_give(linear->freed.device, FAKE_LINEAR, linear->freed.bytes);
        free(linear);
    }
    free(dmabuf);
}

static struct dmabuf *describe_linear(struct range *range) {
    struct described *described = range->object;
    if (described == NULL) {
        described = calloc(1, sizeof *described);
        range->object = described;
    }
    described->descriptors++;
    struct dmabuf *dmabuf = calloc(1, sizeof *dmabuf);
    dmabuf->linear = described;
    return dmabuf;
}

/* Describe mapped physical memory. NULL: a part of the range is not mapped. */
static struct dmabuf *describe_mapped(CUdeviceptr address, uint64_t bytes) {
    size_t count = 0;
    uint64_t done = 0;
    for (uint64_t left; done < bytes && fake_physical_at(address + done, &left) != NULL; done += left)
        count++;
    if (done < bytes)
        return NULL;
    struct dmabuf *dmabuf = calloc(1, sizeof *dmabuf + count * sizeof *dmabuf->pieces);
    done = 0;
    for (uint64_t left; dmabuf->count < count; done += left) {
        struct physical *piece = fake_physical_at(address + done, &left);
        fake_physical_map(piece);
        dmabuf->pieces[dmabuf->count++] = piece;
    }
    return dmabuf;
}

EXPORT CUresult cuMemGetHandleForAddressRange(void *out, CUdeviceptr address, size_t bytes, CUmemRangeHandleType type,
                                              unsigned long long flags) {
    CUresult result = fake_initialized();
    if (result != CUDA_SUCCESS)
        return result;
    if (type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (out == NULL || bytes == 0 || (address | bytes) % HOST_PAGE != 0 ||
        (flags & ~(unsigned long long)CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    struct range *range = fake_range_holding(address);
    struct dmabuf *dmabuf = NULL;
    if (range != NULL && bytes <= range->address + range->bytes - address) {
        if (range->kind == RANGE_LINEAR)
            dmabuf = describe_linear(range);
        else if (range->kind == RANGE_RESERVATION)
            dmabuf = describe_mapped(address, bytes);
    }
    result = dmabuf != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (dmabuf != NULL) {
        uint64_t content = DMABUF_MAGIC;
        int descriptor = fake_export_open(&content, sizeof content, over, dmabuf);
        if (descriptor >= 0)
            *(int *)out = descriptor;
        else {
            over(dmabuf);
            result = CUDA_ERROR_OPERATING_SYSTEM;
        }
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}
