/* Charges: credits are reserved before the driver's call. After it, the allocation is added to the table, under the
 * handle or address that the driver returned. */
#include "memory/charge.h"

#include "memory/credits.h"
#include "memory/physical.h"
#include "memory/refusal.h"
#include "memory/state.h"

CUresult charge_begin(struct charge *charge, CUcontext context, int place, uint64_t bytes) {
    charge->allocation = NULL;
    if (place < 0 && gpus_ungated(memory_state()->gpus))
        return CUDA_SUCCESS;
    if (place < 0) /* not a GPU of the tenant, so its limit is 0 */
        return CUDA_ERROR_OUT_OF_MEMORY;
    memory_lock();
    struct allocation *allocation = allocations_make(&memory_state()->allocations);
    memory_unlock();
    if (allocation == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    allocation->bytes = bytes;
    allocation->context = context;
    allocation->place = (int8_t)place;
    if (!credits_reserve(place, bytes)) {
        memory_lock();
        allocations_drop(&memory_state()->allocations, allocation);
        memory_unlock();
        refusal_say(place, bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    charge->allocation = allocation;
    return CUDA_SUCCESS;
}

void charge_end(struct charge *charge, bool made, enum allocation_kind kind, uint64_t key) {
    struct allocation *allocation = charge->allocation;
    if (made)
        kinds_forget(&memory_state()->kinds);
    if (allocation == NULL)
        return;
    if (!made) {
        uncharge_end(allocation, true);
        return;
    }
    allocation->kind = (uint8_t)kind;
    allocation->key = key;
    memory_lock();
    allocations_add(&memory_state()->allocations, allocation);
    memory_unlock();
}

struct allocation *uncharge_begin(enum allocation_kind kind, uint64_t key) {
    memory_lock();
    struct allocation *allocation = allocations_take(&memory_state()->allocations, kind, key);
    memory_unlock();
    return allocation;
}

void uncharge_end(struct allocation *allocation, bool freed) {
    if (allocation == NULL)
        return;
    struct physical *described = allocation->kind == ALLOCATION_LINEAR ? allocation->physical : NULL;
    if (freed && described == NULL)
        credits_return(allocation->place, allocation->bytes);
    memory_lock();
    if (!freed) {
        allocations_add(&memory_state()->allocations, allocation);
        memory_unlock();
        return;
    }
    allocations_drop(&memory_state()->allocations, allocation);
    if (described != NULL) /* physical_unlock returns the charge, unless descriptors of the memory are open */
        described->mappings--;
    physical_unlock(described);
}

/* Move allocations of the context `from` to the context `to`. `memory`: true: only linear memory and arrays; false:
 * all. */
static void rename_context(CUcontext from, CUcontext to, bool memory) {
    struct allocation_table *table = &memory_state()->allocations;
    memory_lock();
    for (size_t i = 0; i < table->bucket_count; i++)
        for (struct allocation *at = table->buckets[i]; at != NULL; at = at->next)
            if (at->context == from && (!memory || at->kind == ALLOCATION_LINEAR || at->kind == ALLOCATION_ARRAY))
                at->context = to;
    memory_unlock();
}

void memory_rename_context(CUcontext from, CUcontext to) {
    rename_context(from, to, false);
}

void memory_hand_over(CUcontext from, CUcontext to) {
    rename_context(from, to, true);
}
