/* State of the simulated devices: one file, mapped shared by every process that uses the double.
 *
 * Guarantees:
 * - The memory and the record of a process are free when it dies, in whatever way and pid namespace: the kernel drops
 *   its file locks. What another process has open is that one's from then on.
 * - Device time is handed out without locks, so that a process killed at any instruction leaves the timeline usable.
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
    /* End of all work on the device's timeline, CLOCK_MONOTONIC ns, shifted by FAKE_CLIENT_BITS; in the bits below the
     * record of the client whose work that is. 0: the device was never used. */
    _Atomic uint64_t timeline;
};

struct fake_usage {
    _Atomic uint64_t submitted; /* kernels and graphs accepted by a launch call */
    _Atomic uint64_t kernels;   /* finished, or on the timeline */
    _Atomic uint64_t busy_ns;   /* their device time */
    _Atomic uint64_t last_end;  /* CLOCK_MONOTONIC, ns: end of the last of them */
    _Atomic uint64_t memory;    /* bytes of device memory now: the sum of `kinds` */
    _Atomic uint64_t peak;
    _Atomic uint64_t copies;  /* transfers beside the device, accepted */
    _Atomic uint64_t misused; /* of the first device: calls that fake_misused counted */
    _Atomic uint64_t kinds[FAKE_KINDS];
};

struct fake_client {
    char label[FAKE_LABEL_BYTES];
    uint32_t pid;  /* as the process sees it */
    uint32_t used; /* 0: never; the record of a process that ended stays until its place is needed */
    struct fake_usage usage[FAKE_DEVICES];
};

/* Memory that other processes may open. With the memory lock. */
struct fake_share {
    uint64_t bytes;       /* 0: an unused place */
    uint64_t id, group;   /* within the process that made it; what has one group ends together */
    uint32_t maker, pid;  /* its record */
    int32_t device, kind; /* enum fake_kind */
    uint32_t left;        /* its maker has let go of it, or is dead */
    uint32_t counted;     /* record of the process that has it now, plus 1; 0: the maker, or no one alone */
    uint16_t openings[FAKE_CLIENTS];
};

struct fake_state {
    uint32_t magic;
    uint32_t layout;
    uint32_t device_count;
    _Atomic uint32_t release; /* not 0: hung kernels end */
    uint64_t context_bytes;   /* bytes that a process's contexts take of a device */
    struct fake_device devices[FAKE_DEVICES];
    struct fake_client clients[FAKE_CLIENTS];
    struct fake_share shares[FAKE_SHARES];
};

_Static_assert(FAKE_CLIENTS == 1 << FAKE_CLIENT_BITS, "a record fits its bits");
_Static_assert(sizeof(struct fake_device) == 96, "tests/doubles/gpus.py has the same layout");
_Static_assert(sizeof(struct fake_client) == 72 + 128 * FAKE_DEVICES, "tests/doubles/gpus.py has the same layout");
_Static_assert(sizeof(struct fake_share) == 48 + 2 * FAKE_CLIENTS, "tests/doubles/gpus.py has the same layout");

/* Map the file that FAKE_CUDA_STATE names and take a record in it. False if there is none, or it is no state file. */
bool fake_state_attach(void);
/* Map the file for reading: without a record, and with every device of FAKE_CUDA_VISIBLE. */
bool fake_state_watch(void);
/* Forget the parent's mapping and locks, in a child of fork. */
void fake_state_detach(void);
/* Return a visible device by its ordinal: of the devices of FAKE_CUDA_VISIBLE those of CUDA_VISIBLE_DEVICES, in that
 * order; -1 beyond the last. */
int fake_state_visible(int ordinal);
struct fake_device *fake_state_device(int device);
const struct fake_client *fake_state_client(unsigned record);
/* Write "GPU-" and 36 characters into `text`, which has 64 bytes. */
void fake_state_uuid(int device, char *text);
struct fake_usage *fake_state_usage(int device);
bool fake_state_released(void);
/* Get this process's record; return whether the process of a record still lives. */
void fake_state_self(uint32_t *record, uint32_t *pid);
bool fake_state_lives(uint32_t record, uint32_t pid);
/* Put `length` ns on the device's timeline, not before `ready`; return their end. `switch_ns` go before them, and count
 * as no client's use, where the last work on the timeline is another client's. */
uint64_t fake_state_occupy(int device, uint64_t ready, uint64_t length, uint64_t switch_ns);
/* Return the end of all work on the device's timeline, CLOCK_MONOTONIC ns; 0: there was none. */
uint64_t fake_state_busy_until(int device);
/* Take memory of the device. False if there is not as much left. */
bool fake_state_take(int device, enum fake_kind kind, uint64_t bytes);
void fake_state_give(int device, enum fake_kind kind, uint64_t bytes);
/* Let other processes open memory of this one; return its place in the table, the same each time for the same `id`;
 * -1: the table is full. */
int fake_state_share(int device, enum fake_kind kind, uint64_t bytes, uint64_t id, uint64_t group);
/* Open memory that a process shares, and keep it. False: that process has let go of it, or is dead. */
bool fake_state_open(int place, uint32_t maker, uint32_t pid, uint64_t id);
void fake_state_close(int place);
/* Let go of all shared memory of a group, before its bytes are given back. Memory that is open stays taken: it is the
 * process's that alone has it open, and, as on a real driver, no process's while several have. */
void fake_state_leave(uint64_t group);
/* Free the memory of dead processes. */
void fake_state_reap(void);
uint64_t fake_state_context_bytes(void);
/* Return the unused bytes of a device. */
uint64_t fake_state_free(int device);

#endif
