/* Physical memory and multicast objects: the allocations of their handles, and the counts of what refers to them.
 *
 * A struct physical is freed by physical_unlock once handles, mappings and pins are all 0. Freeing a multicast object
 * frees its bindings, which may free physical memory in turn.
 */
#include "memory/physical.h"

#include "memory/credits.h"
#include "memory/state.h"

struct physical *physical_of(CUmemGenericAllocationHandle handle) {
    struct allocation *allocation = allocations_find(&memory_state()->allocations, ALLOCATION_HANDLE, handle);
    return allocation != NULL ? allocation->physical : NULL;
}

void physical_unlock(struct physical *physical) {
    uint64_t bytes = 0;
    int place = -1;
    struct binding *bindings = NULL;
    if (physical != NULL && physical->handles + physical->mappings + physical->pins == 0) {
        bytes = physical->bytes;
        place = physical->place;
        bindings = physical->bindings;
        slab_give(&memory_state()->physical_slab, physical);
    }
    memory_unlock();
    if (place >= 0)
        credits_return(place, bytes);
    physical_unbound(bindings);
}

struct allocation *physical_begin(uint64_t bytes, int place) {
    memory_lock();
    struct allocation *allocation = allocations_make(&memory_state()->allocations);
    struct physical *physical = allocation ? slab_take(&memory_state()->physical_slab, sizeof *physical) : NULL;
    if (physical != NULL) {
        *physical = (struct physical){.bytes = bytes, .place = place, .pins = 1};
        allocation->kind = ALLOCATION_HANDLE;
        allocation->place = (int8_t)place;
        allocation->physical = physical;
    } else if (allocation != NULL) {
        allocations_drop(&memory_state()->allocations, allocation);
        allocation = NULL;
    }
    memory_unlock();
    return allocation;
}

void physical_end(struct allocation *allocation, bool made, CUmemGenericAllocationHandle handle) {
    struct physical *physical = allocation->physical;
    memory_lock();
    physical->pins--;
    if (made) {
        physical->handles++;
        allocation->key = handle;
        allocations_add(&memory_state()->allocations, allocation);
    } else {
        allocations_drop(&memory_state()->allocations, allocation);
    }
    physical_unlock(physical);
}

void physical_unbound(struct binding *bindings) {
    for (struct binding *next; bindings != NULL; bindings = next) {
        struct physical *bound = bindings->bound;
        next = bindings->next;
        memory_lock();
        bound->mappings--;
        slab_give(&memory_state()->binding_slab, bindings);
        physical_unlock(bound);
    }
}

struct physical *physical_at(uint64_t address, uint64_t *left) {
    uint64_t at = address & ~(uint64_t)(MAPPING_STEP - 1);
    for (uint64_t back = 0; back < memory_state()->largest_mapping && at != 0;
         back += MAPPING_STEP, at -= MAPPING_STEP) {
        struct allocation *allocation = allocations_find(&memory_state()->allocations, ALLOCATION_MAPPING, at);
        if (allocation == NULL)
            continue;
        bool inside = address - at < allocation->bytes;
        *left = inside ? allocation->bytes - (address - at) : 0;
        return inside ? allocation->physical : NULL;
    }
    return NULL;
}
