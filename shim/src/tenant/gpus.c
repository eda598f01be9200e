/* Table of the tenant's GPUs, searched by UUID. The result for a CUDA ordinal is stored after the first search. */
#include "tenant/gpus.h"

#include <string.h>

#include "driver/entries.h"

static struct gpu *find(struct gpus *gpus, const uint8_t *uuid) {
    for (unsigned i = 0; i < gpus->count; i++)
        if (memcmp(gpus->gpus[i].uuid, uuid, SHP_UUID_BYTES) == 0)
            return &gpus->gpus[i];
    return NULL;
}

void gpus_learn(struct gpus *gpus, const struct shp_gpu *granted, unsigned count, bool connected) {
    for (unsigned i = 0; i < count; i++) {
        struct gpu *gpu = find(gpus, granted[i].uuid);
        if (gpu == NULL && gpus->count < SHP_MAX_GPUS) {
            gpu = &gpus->gpus[gpus->count++];
            memcpy(gpu->uuid, granted[i].uuid, SHP_UUID_BYTES);
            gpu->wire = -1;
        }
        if (gpu == NULL)
            continue;
        gpu->request = granted[i].request_milli;
        gpu->limit = granted[i].limit_milli;
        gpu->context = (uint64_t)granted[i].context_kib << 10;
        gpu->enforced = (granted[i].flags & SHP_GPU_MEMORY_ENFORCED) != 0;
        uint64_t before = gpu->memory;
        gpu->memory = granted[i].memory;
        if (gpu->memory < before && gpu->enforced && gpus->lowered != NULL)
            gpus->lowered((int)(gpu - gpus->gpus), before);
        if (connected)
            gpu->wire = (int)i;
    }
    for (unsigned i = 0; i < GPUS_DEVICES; i++)
        if (gpus->places[i] < 0)
            gpus->places[i] = 0; /* look up again: a device that was not the tenant's may be now */
    atomic_store(&gpus->ungated, false);
}

void gpus_learn_siblings(struct gpu *gpu, uint64_t used, uint64_t own) {
    gpu->siblings = used > own ? used - own : 0;
    gpu->siblings_known = true;
}

void gpus_disconnect(struct gpus *gpus) {
    for (unsigned i = 0; i < gpus->count; i++) {
        struct gpu *gpu = &gpus->gpus[i];
        gpu->wire = -1;
        gpu->unreported = gpu->unanswered = 0; /* the next connection begins with a report of all credits */
    }
}

struct gpu *gpus_by_wire(struct gpus *gpus, uint32_t wire) {
    for (unsigned i = 0; i < gpus->count; i++)
        if (gpus->gpus[i].wire == (int)wire)
            return &gpus->gpus[i];
    return NULL;
}

int gpus_place(struct gpus *gpus, CUdevice device) {
    CUuuid uuid;
    CUresult result = CUDA_ERROR_NOT_FOUND;
    if (device < 0 || device >= GPUS_DEVICES)
        return GPUS_NO_DEVICE;
    int8_t known = atomic_load(&gpus->places[device]);
    if (known != 0)
        return known > 0 ? known - 1 : GPUS_FOREIGN;
    if (HAS(cuDeviceGetUuid_v2))
        result = DRIVER(cuDeviceGetUuid_v2)(&uuid, device);
    else if (HAS(cuDeviceGetUuid))
        result = DRIVER(cuDeviceGetUuid)(&uuid, device);
    if (result != CUDA_SUCCESS)
        return GPUS_NO_DEVICE;
    lock(&gpus->lock);
    struct gpu *gpu = find(gpus, (const uint8_t *)uuid.bytes);
    atomic_store(&gpus->places[device], (int8_t)(gpu ? gpu - gpus->gpus + 1 : -1));
    unlock(&gpus->lock);
    return gpu ? (int)(gpu - gpus->gpus) : GPUS_FOREIGN;
}

uint32_t gpus_request(struct gpus *gpus) {
    uint32_t least = 1000;
    lock(&gpus->lock);
    for (unsigned i = 0; i < gpus->count; i++)
        if (gpus->gpus[i].request < least)
            least = gpus->gpus[i].request;
    unlock(&gpus->lock);
    return least;
}
