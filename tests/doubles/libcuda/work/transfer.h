/* Transfers: how long they take, and where. */
#ifndef FAKECUDA_TRANSFER_H
#define FAKECUDA_TRANSFER_H

#include "memory/ranges.h"

/* Work on the device, or a transfer with host memory beside it. */
struct work fake_device_work(CUgraphNodeType type, uint64_t bytes);
struct work fake_copy_work(bool host, uint64_t bytes);
CUresult fake_submit_transfer(CUstream handle, struct work work);
/* Whether all of it is known memory of the device. */
bool fake_on_device(CUdeviceptr address, uint64_t bytes);

#endif
