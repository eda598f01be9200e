/* Charge of a call: its bytes are reserved before the driver's call (C1) and returned if it fails (C2).
 *
 * A wrapper that allocates calls charge_begin, the driver, charge_end. A wrapper that frees calls uncharge_begin, the
 * driver, uncharge_end. None of the four keeps the lock (C4).
 */
#ifndef SHAREPOD_CHARGE_H
#define SHAREPOD_CHARGE_H

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

#include "memory/allocations.h"

/* Charge of one call between begin and end. */
struct charge {
    struct allocation *allocation; /* not in the table yet; NULL: nothing is charged, only the driver decides */
};

/* Reserve bytes of a GPU for an allocation that ends with `context` (NULL: outlives contexts). May wait for the agent.
 * CUDA_ERROR_OUT_OF_MEMORY: the tenant's limit does not allow the bytes, or the GPU is not the tenant's. */
CUresult charge_begin(struct charge *charge, CUcontext context, int place, uint64_t bytes);
/* Enter the allocation under its key if the driver made it; otherwise give the charge back. */
void charge_end(struct charge *charge, bool made, enum allocation_kind kind, uint64_t key);

/* Take an allocation out of the table before the driver frees it (C3). NULL: nothing was charged under that key. */
struct allocation *uncharge_begin(enum allocation_kind kind, uint64_t key);
/* Give the charge back if the driver freed the allocation; otherwise enter the allocation again. */
void uncharge_end(struct allocation *allocation, bool freed);

/* Enter a context's allocations under another handle, until it is known whether the context has ended. */
void memory_rename_context(CUcontext from, CUcontext to);
/* Move the allocations of a context to another one. From then on only the end of that context frees them. */
void memory_hand_over(CUcontext from, CUcontext to);

#endif
