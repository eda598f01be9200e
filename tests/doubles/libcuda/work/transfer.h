/* Work of copies and fills: its time on the device, or in parallel to it. */
#ifndef FAKECUDA_TRANSFER_H
#define FAKECUDA_TRANSFER_H

#include "memory/ranges.h"

/* Return the work of a copy or fill on the device, or of a transfer with host memory. */
struct work fake_device_work(CUgraphNodeType type, uint64_t bytes);
struct work fake_copy_work(bool host, uint64_t bytes);
CUresult fake_submit_transfer(CUstream handle, struct work work);
/* Return whether all of the bytes are known device memory. */
bool fake_on_device(CUdeviceptr address, uint64_t bytes);

#endif
