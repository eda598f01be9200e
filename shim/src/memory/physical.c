/* Physical memory and multicast objects: the table's entries of their handles, and the counts of what refers to them. */
#include "memory/physical.h"

#include "memory/credits.h"
#include "memory/lock.h"

struct physical *physical_of(CUmemGenericAllocationHandle handle) {
    struct holding *holding = holdings_find(&books()->holdings, HOLDING_HANDLE, handle);
    return holding != NULL ? holding->physical : NULL;
}

void physical_end(struct physical *physical) {
    uint64_t bytes = 0;
    int place = -1;
    struct binding *bindings = NULL;
    if (physical != NULL && physical->handles + physical->mappings + physical->pins == 0) {
        bytes = physical->bytes;
        place = physical->place;
        bindings = physical->bindings;
        slab_give(&books()->physical_slab, physical);
    }
    books_unlock();
    if (place >= 0)
        credits_return(place, bytes);
    physical_unbound(bindings);
}

struct holding *physical_make(uint64_t bytes, int place) {
    books_lock();
    struct holding *holding = holdings_make(&books()->holdings);
    struct physical *physical = holding ? slab_take(&books()->physical_slab, sizeof *physical) : NULL;
    if (physical != NULL) {
        *physical = (struct physical){.bytes = bytes, .place = place, .pins = 1};
        holding->kind = HOLDING_HANDLE;
        holding->place = (int8_t)place;
        holding->physical = physical;
    } else if (holding != NULL) {
        holdings_drop(&books()->holdings, holding);
        holding = NULL;
    }
    books_unlock();
    return holding;
}

void physical_made(struct holding *holding, bool made, CUmemGenericAllocationHandle handle) {
    struct physical *physical = holding->physical;
    books_lock();
    physical->pins--;
    if (made) {
        physical->handles++;
        holding->key = handle;
        holdings_add(&books()->holdings, holding);
    } else {
        holdings_drop(&books()->holdings, holding);
    }
    physical_end(physical);
}

void physical_unbound(struct binding *bindings) {
    for (struct binding *next; bindings != NULL; bindings = next) {
        struct physical *bound = bindings->bound;
        next = bindings->next;
        books_lock();
        bound->mappings--;
        slab_give(&books()->binding_slab, bindings);
        physical_end(bound);
    }
}

struct physical *physical_at(uint64_t address, uint64_t *left) {
    uint64_t at = address & ~(uint64_t)(MAPPING_STEP - 1);
    for (uint64_t back = 0; back < books()->largest_mapping && at != 0; back += MAPPING_STEP, at -= MAPPING_STEP) {
        struct holding *holding = holdings_find(&books()->holdings, HOLDING_MAPPING, at);
        if (holding == NULL)
            continue;
        bool inside = address - at < holding->bytes;
        *left = inside ? holding->bytes - (address - at) : 0;
        return inside ? holding->physical : NULL;
    }
    return NULL;
}
