/* State of the simulated devices: one file, which every process that uses the double maps (MAP_SHARED).
 *
 * Guarantees:
 * - When a process ends in any way, in any pid namespace, its device memory and its record are free: Linux releases its
 *   file locks, which mark both. Memory that another process has open counts to that process from then on.
 * - Device time is assigned without a lock, so the timeline stays usable if a process is killed at any instruction.
 *
 * tests/doubles/gpus.py reads and writes the same layout.
 */
#ifndef FAKECUDA_STATE_H
#define FAKECUDA_STATE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FAKE_MAGIC 0x314b4146u /* "FAK1" */
#define FAKE_LAYOUT 5u
#define FAKE_DEVICES 16
#define FAKE_CLIENTS 256
#define FAKE_CLIENT_BITS 8
#define FAKE_SHARES 512
#define FAKE_LABEL_BYTES 64

/* Kinds of device memory. */
enum fake_kind {
    FAKE_LINEAR,
    FAKE_MANAGED,
    FAKE_ARRAY,
    FAKE_POOL, /* reserved by pools, used or not */
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
    /* End of all work on the device's timeline, CLOCK_MONOTONIC ns, shifted by FAKE_CLIENT_BITS. The low bits are the
     * index in `clients` of the process with the last work. 0: the device was never used. */
    _Atomic uint64_t timeline;
};

struct fake_usage {
    _Atomic uint64_t submitted; /* number of kernels and graphs accepted by a launch call */
    _Atomic uint64_t kernels;   /* number of kernels and graphs that are finished or on the timeline */
    _Atomic uint64_t busy_ns;   /* their device time */
    _Atomic uint64_t last_end;  /* CLOCK_MONOTONIC, ns: end of the last kernel */
    _Atomic uint64_t memory;    /* bytes of device memory now: the sum of `kinds` */
    _Atomic uint64_t peak;
    _Atomic uint64_t copies;  /* number of accepted transfers with host memory, which take no device time */
    _Atomic uint64_t misused; /* of the first device only: number of calls that fake_misused has counted */
    _Atomic uint64_t kinds[FAKE_KINDS];
    _Atomic uint64_t behind; /* number of launches that were accepted behind an unfinished wait of their stream; not in
                                `kernels` */
    _Atomic uint64_t behind_end; /* CLOCK_MONOTONIC, ns: end of the last such kernel */
};

struct fake_client {
    char label[FAKE_LABEL_BYTES];
    uint32_t pid;  /* pid as the process itself sees it */
    uint32_t used; /* 0: never used. The record of an ended process stays until it is reused */
    struct fake_usage usage[FAKE_DEVICES];
};

/* Device memory that other processes may open (CUDA IPC, exported handles). With the memory lock. */
struct fake_share {
    uint64_t bytes;       /* 0: this place is unused */
    uint64_t id, group;   /* id within the process that created it; memory of one group is released together */
    uint32_t maker, pid;  /* index in `clients`, and pid, of that process */
    int32_t device, kind; /* enum fake_kind */
    uint32_t left;        /* the process that created it has released it, or has ended */
    uint32_t counted;     /* 1 plus the index of the process to which the memory counts after that; 0: before that, or
                             while several processes have it open */
    uint16_t openings[FAKE_CLIENTS];
};

struct fake_state {
    uint32_t magic;
    uint32_t layout;
    uint32_t device_count;
    _Atomic uint32_t release; /* not 0: kernels named "hang" end */
    uint64_t context_bytes;   /* bytes that a process's contexts take of a device */
    struct fake_device devices[FAKE_DEVICES];
    struct fake_client clients[FAKE_CLIENTS];
    struct fake_share shares[FAKE_SHARES];
};

_Static_assert(FAKE_CLIENTS == 1 << FAKE_CLIENT_BITS, "a record fits its bits");
_Static_assert(sizeof(struct fake_device) == 96, "tests/doubles/gpus.py has the same layout");
_Static_assert(sizeof(struct fake_client) == 72 + 144 * FAKE_DEVICES, "tests/doubles/gpus.py has the same layout");
_Static_assert(sizeof(struct fake_share) == 48 + 2 * FAKE_CLIENTS, "tests/doubles/gpus.py has the same layout");

/* Map the state file, whose path is FAKE_CUDA_STATE, and take a record for this process. Return false if there is no
 * such file. */
bool fake_state_attach(void);
/* Map the file for reading only: this process gets no record, and sees every device of FAKE_CUDA_VISIBLE. */
bool fake_state_watch(void);
/* Drop the parent's mapping and locks, in a child of fork. */
void fake_state_detach(void);
/* Return a visible device by its ordinal; -1: the ordinal is too high. Visible are the devices of CUDA_VISIBLE_DEVICES,
 * in that order, among the devices of FAKE_CUDA_VISIBLE. */
int fake_state_visible(int ordinal);
struct fake_device *fake_state_device(int device);
const struct fake_client *fake_state_client(unsigned record);
/* Write "GPU-" and 36 characters into `text`, which has 64 bytes. */
void fake_state_uuid(int device, char *text);
struct fake_usage *fake_state_usage(int device);
bool fake_state_released(void);
/* Get this process's record. Return whether the process of a record still runs. */
void fake_state_self(uint32_t *record, uint32_t *pid);
bool fake_state_lives(uint32_t record, uint32_t pid);
/* Put `length` ns on the device's timeline, not before `ready`, and return their end. If the last work on the timeline
 * is another process's, `switch_ns` ns precede it, which count as no process's use. */
uint64_t fake_state_occupy(int device, uint64_t ready, uint64_t length, uint64_t switch_ns);
/* Return the end of all work on the device's timeline, CLOCK_MONOTONIC ns; 0: there was no work. */
uint64_t fake_state_busy_until(int device);
/* Take memory of the device. Return false if too little is left. */
bool fake_state_take(int device, enum fake_kind kind, uint64_t bytes);
void fake_state_give(int device, enum fake_kind kind, uint64_t bytes);
/* Let other processes open memory of this process. Return its index in `shares`, the same in each call for the same
 * `id`; -1: the table is full. */
int fake_state_share(int device, enum fake_kind kind, uint64_t bytes, uint64_t id, uint64_t group);
/* Open memory that another process shares, so that it stays taken until fake_state_close. Return false if that process
 * has released it, or has ended. */
bool fake_state_open(int place, uint32_t maker, uint32_t pid, uint64_t id);
void fake_state_close(int place);
/* Release all shared memory of a group, before its bytes are freed. Memory that is open elsewhere stays taken. It
 * counts to the only process that has it open. If several have it open, it counts to none, as on a real driver. */
void fake_state_leave(uint64_t group);
/* Free the memory of dead processes. */
void fake_state_reap(void);
uint64_t fake_state_context_bytes(void);
/* Return the unused bytes of a device. */
uint64_t fake_state_free(int device);

#endif
