/* Xid events of the double of NVML.
 *
 * FAKE_NVML_EVENTS: file to which a test appends lines "UUID XID". Without it, no device has events. An event set
 * receives each line once, if the line was appended after the set was created and its device is registered with the
 * set.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "device/state.h"
#include "nvml.h"

enum { NVML_TIMEOUT = 10, XID_CRITICAL_ERROR = 8, STEP_MS = 20, NO_INSTANCE = -1 };

struct event {
    void *device;
    unsigned long long type, content;
    unsigned gpu_instance, compute_instance;
};

/* `heard`: bytes of the file that are already processed. `watched`: the registered devices. */
struct set {
    long heard;
    void *watched[FAKE_DEVICES];
    unsigned count;
};

static const char *file(void) {
    return getenv("FAKE_NVML_EVENTS");
}

EXPORT int nvmlEventSetCreate(void **out) {
    if (file() == NULL)
        return NVML_NOT_SUPPORTED;
    struct set *set = calloc(1, sizeof *set);
    FILE *events = fopen(file(), "re");
    if (events != NULL) {
        fseek(events, 0, SEEK_END);
        set->heard = ftell(events);
        fclose(events);
    }
    *out = set;
    return NVML_SUCCESS;
}

EXPORT int nvmlEventSetFree(void *set) {
    free(set);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetSupportedEventTypes(void *handle, unsigned long long *out) {
    (void)handle;
    *out = file() == NULL ? 0 : XID_CRITICAL_ERROR;
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceRegisterEvents(void *handle, unsigned long long types, void *into) {
    struct set *set = into;
    if (set->count == FAKE_DEVICES)
        return NVML_INVALID_ARGUMENT;
    if (types & XID_CRITICAL_ERROR)
        set->watched[set->count++] = handle;
    return NVML_SUCCESS;
}

/* Read lines up to the next event of a registered device. Return false if the file has none. */
static bool next(struct set *set, struct event *out) {
    char line[128], uuid[64];
    unsigned long long xid;
    bool found = false;
    FILE *events = fopen(file(), "re");
    if (events == NULL)
        return false;
    fseek(events, set->heard, SEEK_SET);
    while (!found && fgets(line, sizeof line, events) != NULL && strchr(line, '\n') != NULL) {
        set->heard = ftell(events);
        void *handle;
        if (sscanf(line, "%63s %llu", uuid, &xid) != 2 || nvmlDeviceGetHandleByUUID(uuid, &handle) != NVML_SUCCESS)
            continue;
        for (unsigned i = 0; i < set->count && !found; i++)
            found = set->watched[i] == handle;
        *out = (struct event){handle, XID_CRITICAL_ERROR, xid, (unsigned)NO_INSTANCE, (unsigned)NO_INSTANCE};
    }
    fclose(events);
    return found;
}

EXPORT int nvmlEventSetWait_v2(void *set, struct event *out, unsigned timeout_ms) {
    const struct timespec step = {.tv_nsec = STEP_MS * 1000000L};
    for (unsigned waited = 0; !next(set, out); waited += STEP_MS) {
        if (waited >= timeout_ms)
            return NVML_TIMEOUT;
        nanosleep(&step, NULL);
    }
    return NVML_SUCCESS;
}

EXPORT int nvmlEventSetWait(void *set, struct event *out, unsigned timeout_ms) {
    return nvmlEventSetWait_v2(set, out, timeout_ms);
}
