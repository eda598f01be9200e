/* Double of libnvidia-ml.so.1 on the simulated devices: the functions that the agent, programs and
 * NVIDIA's device plugin call. events.c has the events.
 *
 * Guarantees:
 * - Figures are the values of the state file (FAKE_CUDA_STATE) at the time of the call.
 * - Processes are the live processes that have memory of the device, by the pid that they themselves see.
 * - A function that is not here is reported as not found; what a GPU may lack is reported as not supported.
 *
 * Variables:
 * - FAKE_CUDA_VISIBLE chooses the devices, as the container does. CUDA_VISIBLE_DEVICES means nothing to NVML.
 * - FAKE_NVML_RESERVED: bytes of each device that the driver reserves for itself. nvmlDeviceGetMemoryInfo (version 1)
 * counts them as used.
 * - FAKE_NVML_MIG=1: one more device, an instance of MIG. FAKE_NVML_MIG_MODE=1: see mig.c.
 * - FAKE_NVML_PROCESSES=none: no process is on any device, as for a caller whose pids differ from the pids that other
 *   processes see of themselves.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "device/state.h"
#include "nvml.h"

/* SAMPLE_EACH: ns between two samples of utilization. PCI_DOMAIN: PCI domain of every device, in which no real machine
 * has a bus. TOPOLOGY_NODE: level of two devices on one NUMA node. */
enum { SAMPLE_EACH = 100000000, PCI_DOMAIN = 0xffff, TOPOLOGY_NODE = 40 };

struct memory {
    unsigned long long total, free, used;
};

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

struct process {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};

struct utilization {
    unsigned gpu, memory;
};

struct pci {
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

struct process_utilization {
    unsigned pid;
    unsigned long long stamp; /* us */
    unsigned sm, memory, encoder, decoder;
};

static const char mig_uuid[] = "MIG-10000000-0000-0000-0000-000000000001";
static const char mig;
static unsigned users;

static unsigned device_count(void) {
    unsigned count = 0;
    while (fake_state_visible((int)count) >= 0)
        count++;
    return count;
}

static bool has_mig(void) {
    const char *value = getenv("FAKE_NVML_MIG");
    return value != NULL && strcmp(value, "1") == 0;
}

static bool shows_processes(void) {
    const char *value = getenv("FAKE_NVML_PROCESSES");
    return value == NULL || strcmp(value, "none") != 0;
}

static uint64_t reserved(void) {
    const char *value = getenv("FAKE_NVML_RESERVED");
    return value == NULL ? 0 : strtoull(value, NULL, 10);
}

/* Wait while the file FAKE_NVML_HANG exists, like the driver of a failed GPU. */
static void hang(void) {
    const char *file = getenv("FAKE_NVML_HANG");
    while (file != NULL && faccessat(AT_FDCWD, file, F_OK, AT_EACCESS) == 0)
        nanosleep(&(struct timespec){.tv_nsec = 5 * 1000 * 1000}, NULL);
}

/* Return the device of a handle; -1: it is no handle. */
static int device_of(const void *handle) {
    if (users == 0 || handle == NULL)
        return -1;
    for (unsigned i = 0; i < device_count(); i++)
        if (fake_state_device(fake_state_visible((int)i)) == handle)
            return fake_state_visible((int)i);
    return -1;
}

int fake_nvml_device(const void *handle) {
    return device_of(handle);
}

EXPORT int nvmlInitWithFlags(unsigned flags) {
    if (flags > 3)
        return NVML_INVALID_ARGUMENT;
    hang();
    if (!fake_state_watch())
        return NVML_DRIVER_NOT_LOADED;
    users++;
    return NVML_SUCCESS;
}

EXPORT int nvmlInit_v2(void) {
    return nvmlInitWithFlags(0);
}

EXPORT int nvmlInit(void) {
    return nvmlInitWithFlags(0);
}

EXPORT int nvmlShutdown(void) {
    if (users == 0)
        return NVML_UNINITIALIZED;
    users--;
    return NVML_SUCCESS;
}

EXPORT const char *nvmlErrorString(int result) {
    switch (result) {
    case NVML_SUCCESS: return "Success";
    case NVML_UNINITIALIZED: return "Uninitialized";
    case NVML_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_NOT_SUPPORTED: return "Not Supported";
    case NVML_NOT_FOUND: return "Not Found";
    case NVML_INSUFFICIENT_SIZE: return "Insufficient Size";
    case NVML_DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case NVML_ARGUMENT_VERSION_MISMATCH: return "Argument Version Mismatch";
    default: return "Unknown Error";
    }
}

EXPORT int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    return text != NULL && snprintf(text, size, "simulated") < (int)size ? NVML_SUCCESS : NVML_INSUFFICIENT_SIZE;
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
    hang();
    if (users == 0)
        return NVML_UNINITIALIZED;
    *count = device_count() + has_mig();
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
    if (users == 0)
        return NVML_UNINITIALIZED;
    unsigned count = device_count();
    if (index >= count + has_mig())
        return NVML_INVALID_ARGUMENT;
    *out = index == count ? (void *)&mig : (void *)fake_state_device(fake_state_visible((int)index));
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
    char own[64];
    int device = device_of(handle);
    unsigned instance;
    if (fake_mig_instance(handle, &device, &instance))
        return snprintf(text, size, "MIG-2000000%d-0000-0000-0000-00000000000%u", device, instance) < (int)size
                   ? NVML_SUCCESS
                   : NVML_INSUFFICIENT_SIZE;
    if (device < 0 && handle != &mig)
        return NVML_INVALID_ARGUMENT;
    if (handle == &mig)
        snprintf(own, sizeof own, "%s", mig_uuid);
    else
        fake_state_uuid(device, own);
    return snprintf(text, size, "%s", own) < (int)size ? NVML_SUCCESS : NVML_INSUFFICIENT_SIZE;
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
    char own[64];
    void *handle;
    for (unsigned i = 0; uuid != NULL && nvmlDeviceGetHandleByIndex_v2(i, &handle) == NVML_SUCCESS; i++)
        if (nvmlDeviceGetUUID(handle, own, sizeof own) == NVML_SUCCESS && strcmp(own, uuid) == 0) {
            *out = handle;
            return NVML_SUCCESS;
        }
    for (int device = 0; uuid != NULL && device < FAKE_DEVICES; device++)
        for (unsigned i = 0; (handle = fake_mig_handle(device, i)) != NULL; i++)
            if (nvmlDeviceGetUUID(handle, own, sizeof own) == NVML_SUCCESS && strcmp(own, uuid) == 0) {
                *out = handle;
                return NVML_SUCCESS;
            }
    return users == 0 ? NVML_UNINITIALIZED : NVML_NOT_FOUND;
}

EXPORT int nvmlDeviceGetIndex(void *handle, unsigned *out) {
    for (unsigned i = 0; i < device_count(); i++)
        if (fake_state_device(fake_state_visible((int)i)) == handle) {
            *out = i;
            return NVML_SUCCESS;
        }
    return NVML_INVALID_ARGUMENT;
}

EXPORT int nvmlDeviceGetMinorNumber(void *handle, unsigned *out) {
    int device = device_of(handle);
    if (device < 0 || out == NULL)
        return NVML_INVALID_ARGUMENT;
    *out = (unsigned)device;
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *out) {
    int device = device_of(handle);
    if (device < 0 || out == NULL)
        return NVML_INVALID_ARGUMENT;
    uint8_t bus = (uint8_t)(device + 1);
    *out = (struct pci){.domain = PCI_DOMAIN, .bus = bus};
    snprintf(out->bus_id_legacy, sizeof out->bus_id_legacy, "%04hX:%02hhX:00.0", (uint16_t)PCI_DOMAIN, bus);
    snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02hhX:00.0", PCI_DOMAIN, bus);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetTopologyCommonAncestor(void *one, void *other, unsigned *out) {
    if (device_of(one) < 0 || device_of(other) < 0 || out == NULL)
        return NVML_INVALID_ARGUMENT;
    *out = TOPOLOGY_NODE;
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetNvLinkState(void *handle, unsigned link, unsigned *out) {
    (void)link, (void)out;
    return device_of(handle) < 0 ? NVML_INVALID_ARGUMENT : NVML_NOT_SUPPORTED;
}

EXPORT int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    if (device_of(handle) < 0 || major == NULL || minor == NULL)
        return NVML_INVALID_ARGUMENT;
    *major = 9, *minor = 0; /* the same as in the double of the driver */
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
    int device = device_of(handle);
    if (device < 0)
        return NVML_INVALID_ARGUMENT;
    return snprintf(text, size, "%s", fake_state_device(device)->model) < (int)size ? NVML_SUCCESS
                                                                                    : NVML_INSUFFICIENT_SIZE;
}

/* Fill in the memory figures of a handle. The instance `mig` has 16 GiB, all of it free. */
static bool figures(const void *handle, struct memory_v2 *out) {
    int device = device_of(handle);
    unsigned instance;
    (void)fake_mig_instance(handle, &device, &instance); /* an instance of mig.c reports the memory of its whole GPU */
    if (device < 0 && (users == 0 || handle != &mig))
        return false;
    out->total = device < 0 ? 16ull << 30 : fake_state_device(device)->memory;
    uint64_t left = device < 0 ? out->total : fake_state_free(device);
    out->used = out->total - left;
    out->reserved = reserved() < left ? reserved() : left;
    out->free = left - out->reserved;
    return true;
}

EXPORT int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *out) {
    struct memory_v2 found;
    if (out == NULL || !figures(handle, &found))
        return NVML_INVALID_ARGUMENT;
    if (out->version != (sizeof *out | 2u << 24))
        return NVML_ARGUMENT_VERSION_MISMATCH;
    found.version = out->version;
    *out = found;
    return NVML_SUCCESS;
}

/* As in the drivers of CUDA 12.2 to 12.5, this calls version 2 by its exported symbol. So a preloaded library that
 * exports this symbol sees the call. */
EXPORT int nvmlDeviceGetMemoryInfo(void *handle, struct memory *out) {
    struct memory_v2 found = {.version = sizeof found | 2u << 24};
    int result = out == NULL ? NVML_INVALID_ARGUMENT : nvmlDeviceGetMemoryInfo_v2(handle, &found);
    if (result == NVML_SUCCESS)
        *out = (struct memory){.total = found.total, .free = found.free, .used = found.used + found.reserved};
    return result;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process *out) {
    int device = device_of(handle);
    if (device < 0 || count == NULL)
        return NVML_INVALID_ARGUMENT;
    unsigned found = 0, room = out == NULL ? 0 : *count;
    fake_state_reap();
    for (unsigned i = 0; i < FAKE_CLIENTS; i++) {
        const struct fake_client *client = fake_state_client(i);
        uint64_t used = client->usage[device].memory;
        if (used == 0 || !shows_processes() || !fake_state_lives(i, client->pid))
            continue;
        if (found < room)
            out[found] = (struct process){client->pid, used, UINT32_MAX, UINT32_MAX};
        found++;
    }
    *count = found;
    return found <= room ? NVML_SUCCESS : NVML_INSUFFICIENT_SIZE;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned *count, struct process *out) {
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, out);
}

static int none_listed(const void *handle, unsigned *count) {
    if (device_of(handle) < 0 || count == NULL)
        return NVML_INVALID_ARGUMENT;
    *count = 0;
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, struct process *out) {
    (void)out;
    return none_listed(handle, count);
}

EXPORT int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *handle, unsigned *count, struct process *out) {
    (void)out;
    return none_listed(handle, count);
}

/* Utilization: 100 if the device is working now, else 0. The real function returns the average of its last period. */
EXPORT int nvmlDeviceGetUtilizationRates(void *handle, struct utilization *out) {
    int device = device_of(handle);
    struct timespec now;
    if (device < 0 || out == NULL)
        return NVML_INVALID_ARGUMENT;
    clock_gettime(CLOCK_MONOTONIC, &now);
    uint64_t ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    *out = (struct utilization){.gpu = fake_state_busy_until(device) > ns ? 100 : 0};
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    if (fake_mig_mode() && device_of(handle) >= 0) {
        *current = *pending = 1;
        return NVML_SUCCESS;
    }
    return device_of(handle) < 0 ? NVML_INVALID_ARGUMENT : NVML_NOT_SUPPORTED;
}

EXPORT int nvmlDeviceGetRemappedRows(void *handle, unsigned *one, unsigned *two, unsigned *pending, unsigned *failed) {
    (void)one, (void)two, (void)pending, (void)failed;
    return device_of(handle) < 0 ? NVML_INVALID_ARGUMENT : NVML_NOT_SUPPORTED;
}

/* The last samples of a device. rows: each process that has worked, with its part of the time since the samples before.
 * busy_ns: device time of each client so far. */
struct samples {
    uint64_t at;                                   /* CLOCK_MONOTONIC, ns */
    uint64_t stamp;                                /* CLOCK_REALTIME in us, like the real driver's time stamps */
    struct process_utilization rows[FAKE_CLIENTS]; /* samples of the processes that have worked */
    unsigned count;
    uint64_t busy_ns[FAKE_CLIENTS];
};

/* Return the samples of a device. Take new ones if the last ones are SAMPLE_EACH or older. */
static const struct samples *sample(int device) {
    static struct samples of[FAKE_DEVICES];
    struct samples *samples = &of[device];
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    uint64_t ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec, elapsed = ns - samples->at;
    if (elapsed < SAMPLE_EACH)
        return samples;
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    samples->stamp = (uint64_t)wall.tv_sec * 1000000u + (uint64_t)wall.tv_nsec / 1000u;
    samples->count = 0;
    for (unsigned i = 0; i < FAKE_CLIENTS; i++) {
        const struct fake_client *client = fake_state_client(i);
        uint64_t busy = client->usage[device].busy_ns, before = samples->busy_ns[i];
        uint64_t part = (busy >= before ? busy - before : busy) * 100 / elapsed;
        samples->busy_ns[i] = busy;
        if (samples->at == 0 || part == 0 || !shows_processes() || !fake_state_lives(i, client->pid))
            continue;
        samples->rows[samples->count++] = (struct process_utilization){
            .pid = client->pid, .stamp = samples->stamp, .sm = part < 100 ? (unsigned)part : 100};
    }
    samples->at = ns;
    return samples;
}

/* Utilization by process: one sample for each process that has worked. The real function returns several samples a
 * second, and also samples of ended processes. */
EXPORT int nvmlDeviceGetProcessUtilization(void *handle, struct process_utilization *out, unsigned *count,
                                           unsigned long long since) {
    int device = device_of(handle);
    if (device < 0 || count == NULL)
        return NVML_INVALID_ARGUMENT;
    const struct samples *samples = sample(device);
    unsigned found = samples->stamp > since ? samples->count : 0, room = out == NULL ? 0 : *count;
    for (unsigned i = 0; i < found && i < room; i++)
        out[i] = samples->rows[i];
    *count = found;
    if (found == 0)
        return NVML_NOT_FOUND;
    return found <= room ? NVML_SUCCESS : NVML_INSUFFICIENT_SIZE;
}
