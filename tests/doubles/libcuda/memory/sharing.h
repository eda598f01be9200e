/* Memory that processes share. */
#ifndef FAKECUDA_SHARING_H
#define FAKECUDA_SHARING_H

#include "device/fake.h"

/* Content of a shareable handle or descriptor; fits into the 64 bytes of CUDA's handle types. */
struct shared {
    uint64_t magic;
    uint32_t client, pid; /* process that created the memory */
    int32_t device;
    int32_t place; /* place in the table of shared memory; -1: not in the table */
    uint64_t address, bytes, asked, id;
};

/* Return the content of a handle for an object of this process; memory is added by fake_describe_share. */
struct shared fake_describe(uint64_t magic, int device);
/* Add described memory to the table of shared memory. Return false if the table is full. */
bool fake_describe_share(struct shared *shared, enum fake_kind kind, uint64_t bytes, uint64_t id, uint64_t group);
/* Open described memory, and keep it until fake_state_close(shared->place). Return false if it no longer exists. */
bool fake_open_shared(const struct shared *shared);
/* Return a descriptor whose receiver can read these bytes; -1: too many open files. */
int fake_describe_in_file(const void *content, size_t bytes);
/* Check whether fabric handles are permitted: CUDA_ERROR_NOT_PERMITTED without an IMEX channel (FAKE_CUDA_IMEX=1). */
CUresult fake_fabric_permitted(void);
CUresult fake_describe_in_fabric(void *out, const struct shared *shared);
CUresult fake_read_from_fabric(struct shared *shared, const void *handle);
/* Close the memory of other processes that a context has opened. With fake_lock. */
void fake_sharing_of_context_gone(struct context *context);

#endif
