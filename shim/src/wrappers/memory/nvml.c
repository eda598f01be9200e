/* Memory sizes that NVML reports. A process that uses CUDA requests them from the agent over its session. Any other
 * process opens a connection of its own, with SHP_HELLO_OBSERVES. */
#include "wrappers/memory/nvml.h"

#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "driver/entries.h"
#include "wrappers/memory/view.h"
#include "tenant/limits.h"
#include "base/elf.h"
#include "memory/state.h"
#include "process/process.h"

/* NVML's types, as in nvml.h of every driver since version 418 (nvml_memory) and version 510 (nvml_memory_v2). */
typedef int nvml_result; /* 0: success; 13: no such function */
typedef void *nvml_device;
struct nvml_memory {
    unsigned long long total, free, used;
};
struct nvml_memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};
enum { NVML_SUCCESS = 0, NVML_FUNCTION_NOT_FOUND = 13, NVML_UUID_BYTES = 96 };

#define PATIENCE (200 * SYS_MS) /* ns for which an agent may leave a request unanswered */

EXPORT nvml_result nvmlDeviceGetMemoryInfo(nvml_device device, struct nvml_memory *memory);
EXPORT nvml_result nvmlDeviceGetMemoryInfo_v2(nvml_device device, struct nvml_memory_v2 *memory);

void *nvml_wrapper(const char *name) {
    static const char first[] = "nvmlDeviceGetMemoryInfo";
    if (name == NULL || strncmp(name, first, sizeof first - 1) != 0)
        return NULL;
    const char *rest = name + sizeof first - 1;
    return rest[0] == '\0'            ? (void *)nvmlDeviceGetMemoryInfo
           : strcmp(rest, "_v2") == 0 ? (void *)nvmlDeviceGetMemoryInfo_v2
                                      : NULL;
}

void *nvml_real(const char *name) {
    struct object nvml;
    return object_find(NVML_FILE, &nvml) ? object_symbol(&nvml, name) : NULL;
}

/* Receive the next frame, truncated to `size` bytes. Return false if none arrives before the deadline. */
static bool receive(int socket, void *frame, size_t size, uint64_t deadline) {
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct pollfd file = {.fd = socket, .events = POLLIN};
    struct iovec part = {.iov_base = frame, .iov_len = size};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    uint64_t now = sys_now();
    struct timespec left = sys_timespec(deadline > now ? deadline - now : 0);
    if (sys_call(SYS_ppoll, (long)&file, 1, (long)&left, 0, 8, 0) != 1)
        return false;
    long got = sys_call(SYS_recvmsg, socket, (long)&message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC, 0, 0, 0);
    struct cmsghdr *first = got > 0 ? CMSG_FIRSTHDR(&message) : NULL;
    if (first != NULL && first->cmsg_level == SOL_SOCKET && first->cmsg_type == SCM_RIGHTS) {
        int descriptor;
        memcpy(&descriptor, CMSG_DATA(first), sizeof descriptor);
        sys_close(descriptor);
    }
    return got >= (long)sizeof(struct shp_header);
}

/* Send a frame of protocol version 1, which has all the fields that are needed here. */
static bool put(int socket, struct shp_header *frame, uint16_t type, uint32_t size, uint32_t seq) {
    *frame =
        (struct shp_header){.magic = SHP_MAGIC, .version = SHP_VERSION_MIN, .type = type, .size = size, .seq = seq};
    return sys_call(SYS_sendto, socket, (long)frame, size, MSG_NOSIGNAL | MSG_DONTWAIT, 0, 0) == (long)size;
}

/* Request the tenant's limit and memory use on a GPU over a connected socket. */
static bool converse(int socket, const uint8_t *uuid, uint64_t *limit, uint64_t *used) {
    union {
        struct shp_header header;
        struct shp_hello hello;
        struct shp_meminfo meminfo;
        struct shp_welcome welcome;
        struct shp_memory memory;
        char bytes[SHP_FRAME_MAX];
    } frame;
    uint64_t deadline = sys_now() + PATIENCE;
    memset(&frame, 0, sizeof frame);
    frame.hello.version_min = SHP_VERSION_MIN;
    frame.hello.version_max = SHP_VERSION_MIN;
    frame.hello.flags = SHP_HELLO_OBSERVES;
    if (!put(socket, &frame.header, SHP_HELLO, sizeof frame.hello, 0))
        return false;
    do {
        if (!receive(socket, &frame, sizeof frame, deadline))
            return false;
    } while (frame.header.type != SHP_WELCOME);
    uint32_t gpu = 0, count = frame.welcome.gpu_count < SHP_MAX_GPUS ? frame.welcome.gpu_count : SHP_MAX_GPUS;
    while (gpu < count && memcmp(frame.welcome.gpus[gpu].uuid, uuid, SHP_UUID_BYTES) != 0)
        gpu++;
    if (gpu == count)
        return false;
    memset(&frame, 0, sizeof frame);
    frame.meminfo.gpu = gpu;
    if (!put(socket, &frame.header, SHP_MEMINFO, sizeof frame.meminfo, 1))
        return false;
    do {
        if (!receive(socket, &frame, sizeof frame, deadline))
            return false;
    } while (frame.header.type != SHP_MEMORY);
    *limit = frame.memory.limit;
    *used = frame.memory.used;
    return true;
}

/* Request the tenant's limit and memory use over a separate connection, which does not count as a process that uses the
 * GPU. Used in a process without a session. */
static bool ask_once(const char *directory, const uint8_t *uuid, uint64_t *limit, uint64_t *used) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = strlen(directory);
    if (length + sizeof "agent.sock" > sizeof address.sun_path)
        return false;
    memcpy(address.sun_path, directory, length);
    memcpy(address.sun_path + length, "agent.sock", sizeof "agent.sock");
    long socket = sys_call(SYS_socket, AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, 0, 0, 0);
    if (socket < 0)
        return false;
    bool came = sys_call(SYS_connect, socket, (long)&address, sizeof address, 0, 0, 0) == 0 &&
                converse((int)socket, uuid, limit, used);
    sys_close((int)socket);
    return came;
}

/* Return true if the call that returns to this address was made by NVML itself. NVML's functions call each other by
 * name, and then need NVML's own byte counts, not the tenant's. */
static bool from_within(const void *caller) {
    struct object nvml;
    return object_holding(caller, NVML_FILE, &nvml);
}

/* Get the same byte counts as cuMemGetInfo, in a process that uses CUDA. Return false if no agent is connected and no
 * agent has reported the use of the tenant's other processes. */
static bool ask_session(const uint8_t *uuid, uint64_t *limit, uint64_t *used) {
    const struct process *process = atomic_load(&the_process);
    int place = -1;
    if (process == NULL || memory_state() == NULL)
        return false;
    memory_lock();
    const struct gpus *gpus = memory_state()->gpus;
    for (unsigned i = 0; i < gpus->count; i++)
        if (memcmp(gpus->gpus[i].uuid, uuid, SHP_UUID_BYTES) == 0 &&
            (gpus->gpus[i].siblings_known || atomic_load(&process->session.ready)))
            place = (int)i;
    memory_unlock();
    return memory_view(place, limit, used);
}

/* Get the tenant's limit and memory use. Return false if the program must get the driver's byte counts. Before the call
 * `*used` is the driver's byte count. It is unchanged if the tenant's use is unknown, so that the program never sees
 * more free memory than there is. */
static bool tenants_view(nvml_device device, uint64_t *limit, uint64_t *used) {
    nvml_result (*uuid_of)(nvml_device, char *, unsigned) =
        (nvml_result (*)(nvml_device, char *, unsigned))nvml_real("nvmlDeviceGetUUID");
    char text[NVML_UUID_BYTES], directory[256];
    const char *at = text;
    uint8_t uuid[SHP_UUID_BYTES];
    struct limits limits;
    if (uuid_of == NULL || uuid_of(device, text, sizeof text) != NVML_SUCCESS || !limits_take_uuid(&at, uuid) ||
        !object_own_directory(directory, sizeof directory) || !limits_read(directory, &limits))
        return false;
    for (unsigned i = 0; i < limits.count; i++) {
        const struct shp_gpu *gpu = &limits.gpus[i];
        if (memcmp(gpu->uuid, uuid, SHP_UUID_BYTES) != 0)
            continue;
        if ((gpu->flags & SHP_GPU_MEMORY_ENFORCED) == 0)
            return false;
        *limit = gpu->memory;
        if (!ask_session(uuid, limit, used))
            ask_once(directory, uuid, limit, used);
        return true;
    }
    return false;
}

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

/* Replace each of the driver's byte counts of a GPU by the tenant's, but never by a larger count. Return false if the
 * driver's byte counts must be shown. */
static bool show(nvml_device device, unsigned long long *total, unsigned long long *free, unsigned long long *used) {
    uint64_t limit, taken = *used;
    if (!tenants_view(device, &limit, &taken))
        return false;
    *total = least(*total, limit);
    *used = least(taken, *total);
    *free = least(*free, *total - *used);
    return true;
}

nvml_result nvmlDeviceGetMemoryInfo(nvml_device device, struct nvml_memory *memory) {
    nvml_result (*real)(nvml_device, struct nvml_memory *) =
        (nvml_result (*)(nvml_device, struct nvml_memory *))nvml_real("nvmlDeviceGetMemoryInfo");
    if (real == NULL)
        return NVML_FUNCTION_NOT_FOUND;
    nvml_result result = real(device, memory);
    if (result == NVML_SUCCESS && memory != NULL && !from_within(__builtin_return_address(0)))
        show(device, &memory->total, &memory->free, &memory->used);
    return result;
}

nvml_result nvmlDeviceGetMemoryInfo_v2(nvml_device device, struct nvml_memory_v2 *memory) {
    nvml_result (*real)(nvml_device, struct nvml_memory_v2 *) =
        (nvml_result (*)(nvml_device, struct nvml_memory_v2 *))nvml_real("nvmlDeviceGetMemoryInfo_v2");
    if (real == NULL)
        return NVML_FUNCTION_NOT_FOUND;
    nvml_result result = real(device, memory);
    if (result == NVML_SUCCESS && memory != NULL && !from_within(__builtin_return_address(0)) &&
        show(device, &memory->total, &memory->free, &memory->used))
        memory->reserved = 0; /* the memory that the driver reserves is not part of the tenant's limit */
    return result;
}
