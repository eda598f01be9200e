/* Charge of one driver call: its bytes are reserved before the call (C1) and returned if the call fails (C2).
 *
 * A wrapper that allocates calls charge_begin, the driver, and charge_end. A wrapper that frees calls uncharge_begin,
 * the driver, and uncharge_end. None of the four functions holds the lock when it returns (C4). memory/state.h has C1
 * to C6.
 */
#ifndef SHAREPOD_CHARGE_H
#define SHAREPOD_CHARGE_H

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

#include "memory/allocations.h"

/* Charge of one call, from charge_begin to charge_end. */
struct charge {
    struct allocation
        *allocation; /* charged, but not in the table yet; NULL: nothing is charged, and the call may be made */
};

/* Charge `bytes` bytes on the GPU at `place`, for an allocation that ends with `context` (NULL: it outlives contexts).
 * May wait for the agent. Return CUDA_ERROR_OUT_OF_MEMORY if the tenant's limit does not allow the bytes, if the GPU is
 * not the tenant's, or if host memory is exhausted. */
CUresult charge_begin(struct charge *charge, CUcontext context, int place, uint64_t bytes);
/* If the driver made the allocation, add it to the table under its key. Otherwise return the charge. */
void charge_end(struct charge *charge, bool made, enum allocation_kind kind, uint64_t key);

/* Remove an allocation from the table before the driver frees it (C3), and return it; NULL: nothing was charged under
 * this key. */
struct allocation *uncharge_begin(enum allocation_kind kind, uint64_t key);
/* If the driver freed the allocation, return its charge. Otherwise add the allocation to the table again. */
void uncharge_end(struct allocation *allocation, bool freed);

/* Move all allocations of the context `from` to the handle `to`. Used while the driver destroys a context, until it is
 * known whether the context has ended. */
void memory_rename_context(CUcontext from, CUcontext to);
/* Move the linear memory and arrays of the context `from` to the context `to`. From then on they end with `to`. */
void memory_hand_over(CUcontext from, CUcontext to);

#endif
