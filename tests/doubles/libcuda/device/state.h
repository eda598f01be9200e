/* The simulated devices: one file, mapped shared by every process that uses the double.
 *
 * Guarantees: what a process holds (memory, its record) comes back when it dies in whatever way, and in whatever pid
 * namespace it lived, because the kernel drops its file locks; device time is handed out without locks, so that a
 * process killed at any instruction leaves the timeline usable. tests/doubles/gpus.py reads and writes the same
 * layout.
 */
#ifndef FAKECUDA_STATE_H
#define FAKECUDA_STATE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FAKE_MAGIC 0x314b4146u /* "FAK1" */
#define FAKE_LAYOUT 3u
#define FAKE_DEVICES 16
#define FAKE_CLIENTS 256
#define FAKE_LABEL_BYTES 64

/* What device memory is taken for. */
enum fake_kind {
    FAKE_LINEAR,
    FAKE_MANAGED,
    FAKE_ARRAY,
    FAKE_POOL, /* all that the pools hold, used or not */
    FAKE_VIRTUAL,
    FAKE_GRAPH,
    FAKE_MODULE,
    FAKE_CONTEXT,
    FAKE_KINDS
};

struct fake_device {
    uint8_t uuid[16];
    char model[64];
    uint64_t memory;
    _Atomic uint64_t busy_until; /* CLOCK_MONOTONIC: when the device has done all that was put on its timeline */
};

struct fake_usage {
    _Atomic uint64_t submitted; /* kernels and graphs accepted by a launch call */
    _Atomic uint64_t kernels;   /* finished, or on the timeline */
    _Atomic uint64_t busy_ns;   /* device time of them */
    _Atomic uint64_t last_end;  /* CLOCK_MONOTONIC: when the last of them ends */
    _Atomic uint64_t memory;    /* bytes of device memory now: the sum of `kinds` */
    _Atomic uint64_t peak;
    _Atomic uint64_t copies;   /* transfers beside the device, accepted */
    _Atomic uint64_t reserved; /* unused */
    _Atomic uint64_t kinds[FAKE_KINDS];
};

struct fake_client {
    char label[FAKE_LABEL_BYTES];
    uint32_t pid;  /* as the process sees it */
    uint32_t used; /* 0: never; the record of a process that ended stays until its place is needed */
    struct fake_usage usage[FAKE_DEVICES];
};

struct fake_state {
    uint32_t magic;
    uint32_t layout;
    uint32_t device_count;
    _Atomic uint32_t release; /* not 0: hung kernels end */
    uint64_t context_bytes;   /* what each context takes of its device */
    struct fake_device devices[FAKE_DEVICES];
    struct fake_client clients[FAKE_CLIENTS];
};

_Static_assert(sizeof(struct fake_device) == 96, "tests/doubles/gpus.py has the same layout");
_Static_assert(sizeof(struct fake_client) == 72 + 128 * FAKE_DEVICES, "tests/doubles/gpus.py has the same layout");

/* Maps the file FAKE_CUDA_STATE names and takes a record in it; false when there is none, or it is not such a file. */
bool fake_state_attach(void);
/* Maps it to look only: no record, and every device of FAKE_CUDA_VISIBLE. */
bool fake_state_watch(void);
/* In the child of a fork: forgets the parent's mapping and locks. */
void fake_state_detach(void);
/* The devices that FAKE_CUDA_VISIBLE and, of those, CUDA_VISIBLE_DEVICES let this process see, in their order; -1
 * beyond the last. */
int fake_state_visible(int ordinal);
struct fake_device *fake_state_device(int device);
const struct fake_client *fake_state_client(unsigned record);
/* "GPU-" and 36 characters, into `text` of 64. */
void fake_state_uuid(int device, char *text);
struct fake_usage *fake_state_usage(int device);
bool fake_state_released(void);
/* Which record is this process's; whether the process of a record still lives. */
void fake_state_self(uint32_t *record, uint32_t *pid);
bool fake_state_lives(uint32_t record, uint32_t pid);
/* Puts `length` ns on the device's timeline, not before `ready`; returns when it ends. */
uint64_t fake_state_occupy(int device, uint64_t ready, uint64_t length);
/* Takes memory of the device; false when there is not as much left. */
bool fake_state_take(int device, enum fake_kind kind, uint64_t bytes);
void fake_state_give(int device, enum fake_kind kind, uint64_t bytes);
uint64_t fake_state_context_bytes(void);
/* Bytes that nobody uses. */
uint64_t fake_state_free(int device);

#endif
