/* The state file: records of processes, device memory, and device time. See state.h. */
#include "device/state.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Bytes of the state file that are locked by open-file-description locks; they need not exist. One lock is for memory.
 * One per record is held while its process runs. */
enum { MEMORY_LOCK_BYTE = 1 << 24, CLIENT_LOCK_BYTE = 1 << 25 };

static struct fake_state *state;
static struct fake_client *self;
static int state_fd = -1;
static int visible[FAKE_DEVICES];
static pthread_mutex_t memory_mutex = PTHREAD_MUTEX_INITIALIZER;

static int lock_byte(int command, off_t byte, short type) {
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    int result;
    do {
        result = fcntl(state_fd, command, &lock);
    } while (result != 0 && errno == EINTR);
    if (result == 0 && command == F_OFD_GETLK)
        return lock.l_type != F_UNLCK;
    return result;
}

static void lock_memory(void) {
    pthread_mutex_lock(&memory_mutex);
    lock_byte(F_OFD_SETLKW, MEMORY_LOCK_BYTE, F_WRLCK);
}

static void unlock_memory(void) {
    lock_byte(F_OFD_SETLK, MEMORY_LOCK_BYTE, F_UNLCK);
    pthread_mutex_unlock(&memory_mutex);
}

static void add(struct fake_usage *usage, int kind, uint64_t bytes) {
    usage->memory += bytes;
    usage->kinds[kind] += bytes;
    if (usage->memory > usage->peak)
        usage->peak = usage->memory;
}

/* After the creator of shared memory has released it: count it to the only process that has it open. If none has it
 * open, free its entry. With the memory lock. */
static void count(struct fake_share *share) {
    unsigned openers = 0, counted = 0;
    for (unsigned i = 0; i < FAKE_CLIENTS; i++)
        if (share->openings[i] > 0) {
            openers++;
            counted = i + 1;
        }
    if (openers != 1)
        counted = 0;
    if (share->counted != counted && share->counted != 0) {
        struct fake_usage *before = &state->clients[share->counted - 1].usage[share->device];
        before->memory -= share->bytes;
        before->kinds[share->kind] -= share->bytes;
    }
    if (share->counted != counted && counted != 0)
        add(&state->clients[counted - 1].usage[share->device], share->kind, share->bytes);
    share->counted = counted;
    if (openers == 0)
        memset(share, 0, sizeof *share);
}

/* Remove an ended process from the table of shared memory. With the memory lock. */
static void reap_shares(unsigned dead) {
    for (int i = 0; i < FAKE_SHARES; i++) {
        struct fake_share *share = &state->shares[i];
        if (share->bytes == 0)
            continue;
        bool ends = share->maker == dead && !share->left;
        share->left |= ends;
        if (share->counted == dead + 1)
            share->counted = 0;
        if (ends || share->openings[dead] > 0) {
            share->openings[dead] = 0;
            if (share->left)
                count(share);
        }
    }
}

/* Free the memory of ended processes. With the memory lock. */
static void reap(void) {
    for (int i = 0; i < FAKE_CLIENTS; i++) {
        struct fake_client *client = &state->clients[i];
        if (!client->used || client == self || lock_byte(F_OFD_GETLK, CLIENT_LOCK_BYTE + i, F_WRLCK) != 0)
            continue;
        for (int device = 0; device < FAKE_DEVICES; device++) {
            struct fake_usage *usage = &client->usage[device];
            usage->memory = 0;
            for (int kind = 0; kind < FAKE_KINDS; kind++)
                usage->kinds[kind] = 0;
        }
        reap_shares((unsigned)i);
    }
}

static bool take_record(void) {
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < FAKE_CLIENTS; i++) {
            struct fake_client *client = &state->clients[i];
            if (pass == 0 && client->used)
                continue;
            if (lock_byte(F_OFD_SETLK, CLIENT_LOCK_BYTE + i, F_WRLCK) != 0)
                continue;
            memset(client, 0, sizeof *client);
            const char *label = getenv("FAKE_CUDA_LABEL");
            if (label != NULL && *label != '\0')
                snprintf(client->label, sizeof client->label, "%s", label);
            else
                snprintf(client->label, sizeof client->label, "%d", (int)getpid());
            client->pid = (uint32_t)getpid();
            client->used = 1;
            self = client;
            return true;
        }
    return false;
}

static void format_uuid(const uint8_t *uuid, char *text) {
    int at = sprintf(text, "GPU-");
    for (int i = 0; i < 16; i++)
        at += sprintf(text + at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", uuid[i]);
}

/* Return the device that a text names by index or by the beginning of its UUID; -1: no device, or several. */
static int named(const char *text, const int *devices, int count) {
    int found = -1;
    char *end;
    long index = strtol(text, &end, 10);
    if (end != text && *end == '\0')
        return index >= 0 && index < count ? (int)index : -1;
    for (int i = 0; i < count && strlen(text) > strlen("GPU-"); i++) {
        char uuid[64];
        format_uuid(state->devices[devices[i]].uuid, uuid);
        if (strncasecmp(uuid, text, strlen(text)) != 0)
            continue;
        if (found >= 0)
            return -1;
        found = i;
    }
    return found;
}

/* Select the devices of CUDA_VISIBLE_DEVICES, in its order, up to the first unknown device. If a device is named twice,
 * select none. */
static void choose(const char *list) {
    int before[FAKE_DEVICES], count = 0, chosen = 0;
    for (; count < FAKE_DEVICES && visible[count] >= 0; count++) {
        before[count] = visible[count];
        visible[count] = -1;
    }
    char *copy = strdup(list), *rest = copy;
    for (char *item = strsep(&rest, ","); item != NULL && chosen < FAKE_DEVICES; item = strsep(&rest, ",")) {
        int place = named(item + strspn(item, " "), before, count);
        if (place < 0)
            break;
        for (int i = 0; i < chosen; i++)
            if (visible[i] == before[place]) {
                visible[0] = -1;
                free(copy);
                return;
            }
        visible[chosen++] = before[place];
    }
    free(copy);
}

/* Select the devices for which the folder FAKE_CUDA_DEVICES has a file with their UUID as its name. The files stand for
 * the device nodes of a container. */
static int find_marked(const char *folder) {
    int count = 0;
    for (int i = 0; i < (int)state->device_count; i++) {
        char path[PATH_MAX], uuid[64];
        format_uuid(state->devices[i].uuid, uuid);
        if (snprintf(path, sizeof path, "%s/%s", folder, uuid) < (int)sizeof path && access(path, F_OK) == 0)
            visible[count++] = i;
    }
    return count;
}

/* Select the devices of FAKE_CUDA_VISIBLE: the container's devices, as in NVIDIA_VISIBLE_DEVICES. */
static void find_visible(const char *choice) {
    const char *list = getenv("FAKE_CUDA_VISIBLE"), *folder = getenv("FAKE_CUDA_DEVICES");
    int all[FAKE_DEVICES], count = 0;
    for (int i = 0; i < FAKE_DEVICES; i++) {
        all[i] = i;
        visible[i] = -1;
    }
    char *copy = list == NULL || strcmp(list, "all") == 0 ? NULL : strdup(list), *rest = copy;
    if (folder != NULL)
        count = find_marked(folder);
    else if (copy == NULL)
        for (; count < (int)state->device_count; count++)
            visible[count] = count;
    for (char *item = folder != NULL ? NULL : strsep(&rest, ","); item != NULL && count < FAKE_DEVICES;
         item = strsep(&rest, ",")) {
        int device = named(item, all, (int)state->device_count);
        if (device >= 0)
            visible[count++] = device;
    }
    free(copy);
    if (choice != NULL)
        choose(choice);
}

static bool attach(bool record) {
    const char *path = getenv("FAKE_CUDA_STATE");
    struct stat facts;
    if (state != NULL)
        return true;
    state_fd = path == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (state_fd < 0) {
        fprintf(stderr, "fake CUDA: FAKE_CUDA_STATE=%s: %s\n", path ? path : "(unset)",
                strerror(path ? errno : ENOENT));
        return false;
    }
    if (fstat(state_fd, &facts) != 0 || facts.st_size < (off_t)sizeof *state)
        goto fail;
    state = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, state_fd, 0);
    if (state == MAP_FAILED || state->magic != FAKE_MAGIC || state->layout != FAKE_LAYOUT)
        goto fail;
    find_visible(record ? getenv("CUDA_VISIBLE_DEVICES") : NULL);
    lock_memory();
    if (record)
        reap();
    bool taken = !record || take_record();
    unlock_memory();
    if (taken)
        return true;
fail:
    fprintf(stderr, "fake CUDA: %s is not a usable state file of layout %u\n", path, FAKE_LAYOUT);
    if (state != NULL && state != MAP_FAILED)
        munmap(state, sizeof *state);
    state = NULL;
    close(state_fd);
    state_fd = -1;
    return false;
}

bool fake_state_attach(void) {
    return attach(true);
}

bool fake_state_watch(void) {
    return attach(false);
}

void fake_state_detach(void) {
    if (state_fd >= 0)
        close(state_fd);
    state_fd = -1;
    if (state != NULL)
        munmap(state, sizeof *state);
    state = NULL;
    self = NULL;
}

int fake_state_visible(int ordinal) {
    return ordinal < 0 || ordinal >= FAKE_DEVICES ? -1 : visible[ordinal];
}

struct fake_device *fake_state_device(int device) {
    return &state->devices[device];
}

const struct fake_client *fake_state_client(unsigned record) {
    return &state->clients[record];
}

void fake_state_uuid(int device, char *text) {
    format_uuid(state->devices[device].uuid, text);
}

struct fake_usage *fake_state_usage(int device) {
    return &self->usage[device];
}

void fake_state_self(uint32_t *record, uint32_t *pid) {
    *record = (uint32_t)(self - state->clients);
    *pid = self->pid;
}

bool fake_state_lives(uint32_t record, uint32_t pid) {
    if (record >= FAKE_CLIENTS || state->clients[record].pid != pid)
        return false;
    return &state->clients[record] == self || lock_byte(F_OFD_GETLK, CLIENT_LOCK_BYTE + (off_t)record, F_WRLCK) == 1;
}

bool fake_state_released(void) {
    return state->release != 0;
}

/* The end and the client are in one word, so no lock is needed. */
uint64_t fake_state_occupy(int device, uint64_t ready, uint64_t length, uint64_t switch_ns) {
    _Atomic uint64_t *timeline = &state->devices[device].timeline;
    uint64_t record = (uint64_t)(self - state->clients), before = *timeline, end;
    do {
        uint64_t busy = before >> FAKE_CLIENT_BITS, last = before & (FAKE_CLIENTS - 1);
        end = (busy > ready ? busy : ready) + length + (before != 0 && last != record ? switch_ns : 0);
    } while (!atomic_compare_exchange_weak(timeline, &before, end << FAKE_CLIENT_BITS | record));
    struct fake_usage *usage = fake_state_usage(device);
    usage->busy_ns += length;
    usage->last_end = end;
    return end;
}

uint64_t fake_state_busy_until(int device) {
    return state->devices[device].timeline >> FAKE_CLIENT_BITS;
}

/* With the memory lock. */
static uint64_t unused(int device) {
    uint64_t used = 0;
    for (int i = 0; i < FAKE_CLIENTS; i++)
        used += state->clients[i].usage[device].memory;
    for (int i = 0; i < FAKE_SHARES; i++) {
        const struct fake_share *share = &state->shares[i];
        if (share->left && share->counted == 0 && share->device == device)
            used += share->bytes;
    }
    uint64_t total = state->devices[device].memory;
    return used < total ? total - used : 0;
}

uint64_t fake_state_context_bytes(void) {
    return state->context_bytes;
}

bool fake_state_take(int device, enum fake_kind kind, uint64_t bytes) {
    lock_memory();
    reap();
    bool fits = bytes <= unused(device);
    if (fits)
        add(fake_state_usage(device), kind, bytes);
    unlock_memory();
    return fits;
}

void fake_state_give(int device, enum fake_kind kind, uint64_t bytes) {
    struct fake_usage *usage = fake_state_usage(device);
    usage->memory -= bytes;
    usage->kinds[kind] -= bytes;
}

uint64_t fake_state_free(int device) {
    lock_memory();
    reap();
    uint64_t bytes = unused(device);
    unlock_memory();
    return bytes;
}

int fake_state_share(int device, enum fake_kind kind, uint64_t bytes, uint64_t id, uint64_t group) {
    uint32_t maker, pid;
    int place = -1;
    fake_state_self(&maker, &pid);
    lock_memory();
    for (int i = FAKE_SHARES - 1; i >= 0; i--) {
        const struct fake_share *share = &state->shares[i];
        bool same = share->bytes != 0 && !share->left && share->maker == maker && share->id == id;
        if (same || (share->bytes == 0 && bytes != 0))
            place = i;
        if (same)
            break;
    }
    if (place >= 0 && state->shares[place].bytes == 0)
        state->shares[place] = (struct fake_share){
            .bytes = bytes, .id = id, .group = group, .maker = maker, .pid = pid, .device = device, .kind = (int)kind};
    unlock_memory();
    return place;
}

bool fake_state_open(int place, uint32_t maker, uint32_t pid, uint64_t id) {
    if (place < 0 || place >= FAKE_SHARES)
        return false;
    struct fake_share *share = &state->shares[place];
    lock_memory();
    reap();
    bool opens = share->bytes != 0 && !share->left && share->maker == maker && share->pid == pid && share->id == id;
    if (opens)
        share->openings[self - state->clients]++;
    unlock_memory();
    return opens;
}

void fake_state_close(int place) {
    if (place < 0)
        return;
    struct fake_share *share = &state->shares[place];
    lock_memory();
    share->openings[self - state->clients]--;
    if (share->left)
        count(share);
    unlock_memory();
}

void fake_state_leave(uint64_t group) {
    uint32_t maker = (uint32_t)(self - state->clients);
    lock_memory();
    reap();
    for (int i = 0; i < FAKE_SHARES; i++) {
        struct fake_share *share = &state->shares[i];
        if (share->bytes != 0 && share->maker == maker && share->group == group && !share->left) {
            share->left = 1;
            count(share);
        }
    }
    unlock_memory();
}

void fake_state_reap(void) {
    lock_memory();
    reap();
    unlock_memory();
}
