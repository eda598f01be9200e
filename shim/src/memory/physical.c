/* Physical memory and multicast objects: the allocations of their handles, and the counts of their references.
 *
 * physical_unlock frees a struct physical when handles, mappings, pins and exports are all 0. If only exports are left,
 * it lingers: it stays charged, in the list `lingering`, until their descriptors are closed. No event reports that, so
 * open descriptors are counted every LOOK_NS, and before an allocation is refused. A freed multicast object frees its
 * bindings, which may free physical memory in turn.
 */
#include "memory/physical.h"

#include "memory/credits.h"
#include "memory/exports.h"
#include "memory/state.h"

#define LOOK_NS SYS_SECOND /* time between two checks of lingering memory: a check is a few system calls */
#define MOMENT (20 * 1000) /* ns between two checks whether other threads have returned charges */
enum {
    MOMENTS = 500
}; /* most such checks, because such a thread may never finish: a signal handler may have jumped
      out of it */

struct physical *physical_of(CUmemGenericAllocationHandle handle) {
    struct allocation *allocation = allocations_find(&memory_state()->allocations, ALLOCATION_HANDLE, handle);
    return allocation != NULL ? allocation->physical : NULL;
}

/* Free a struct physical to which nothing refers, and release the lock. */
static void free_and_unlock(struct physical *physical) {
    struct physical freed = *physical;
    slab_give(&memory_state()->physical_slab, physical);
    memory_unlock();
    exports_let_go(freed.kept);
    credits_return(freed.place, freed.bytes);
    physical_unbound(freed.bindings);
}

static bool in_use(const struct physical *physical) {
    return physical->handles + physical->mappings + physical->pins > 0;
}

void physical_unlock(struct physical *physical) {
    if (physical == NULL || in_use(physical) || physical->lingers) {
        memory_unlock();
        return;
    }
    if (physical->exports > 0)
        exports_count_seldom();
    if (physical->exports == 0) {
        free_and_unlock(physical);
        return;
    }
    struct memory *memory = memory_state();
    bool first = memory->lingering == NULL;
    physical->lingers = true;
    physical->next = memory->lingering;
    memory->lingering = physical;
    memory_unlock();
    if (first)
        session_wake();
}

/* Remove the lingering entries without an open descriptor from the list, and return them as a list. The caller holds
 * the lock. */
static struct physical *take_closed(void) {
    struct physical *closed = NULL;
    for (struct physical **at = &memory_state()->lingering, *physical; (physical = *at) != NULL;) {
        if (physical->exports > 0) {
            at = &physical->next;
            continue;
        }
        *at = physical->next;
        physical->next = closed;
        closed = physical;
    }
    return closed;
}

/* Free the memory of a list that take_closed returned, and return its charges. Then decrement `giving_back`. */
static void give_back(struct physical *closed) {
    for (struct physical *next; closed != NULL; closed = next) {
        next = closed->next;
        memory_lock();
        free_and_unlock(closed);
    }
    atomic_fetch_add(&memory_state()->given_back, 1);
    atomic_fetch_sub(&memory_state()->giving_back, 1);
}

/* Also waits for other threads, such as the hook thread, that have removed entries but not returned their charges yet.
 */
bool physical_refresh(void) {
    struct memory *memory = memory_state();
    memory_lock();
    if (memory->lingering != NULL)
        exports_count();
    struct physical *closed = take_closed();
    bool others = atomic_load(&memory->giving_back) > 0;
    if (closed != NULL)
        atomic_fetch_add(&memory->giving_back, 1);
    memory_unlock();
    if (closed != NULL)
        give_back(closed);
    for (int i = 0; others && i < MOMENTS && atomic_load(&memory->giving_back) > 0; i++)
        sys_sleep(MOMENT);
    return closed != NULL;
}

uint64_t physical_step(uint64_t now) {
    struct memory *memory = memory_state();
    memory_lock();
    bool lingers = memory->lingering != NULL;
    memory_unlock();
    if (!lingers || now < memory->physical_next_look)
        return lingers ? memory->physical_next_look : SYS_NEVER;
    physical_refresh();
    memory->physical_next_look = now + LOOK_NS;
    return memory->physical_next_look;
}

struct allocation *physical_begin(uint64_t bytes, int place) {
    memory_lock();
    struct allocation *allocation = allocations_make(&memory_state()->allocations);
    struct physical *physical = allocation ? slab_take(&memory_state()->physical_slab, sizeof *physical) : NULL;
    if (physical != NULL) {
        *physical = (struct physical){.bytes = bytes, .place = place, .pins = 1, .kept = -1};
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

bool physical_bind(struct binding **list, struct physical *bound, uint64_t at, uint64_t bytes) {
    struct binding *binding = slab_take(&memory_state()->binding_slab, sizeof *binding);
    if (binding == NULL)
        return false;
    *binding = (struct binding){.next = *list, .bound = bound, .at = at, .bytes = bytes};
    *list = binding;
    bound->mappings++;
    return true;
}

struct physical *physical_object(struct physical *piece) {
    struct physical *object = slab_take(&memory_state()->physical_slab, sizeof *object);
    if (object == NULL)
        return NULL;
    *object = (struct physical){.place = -1, .pins = 1, .kept = -1};
    if (physical_bind(&object->bindings, piece, 0, piece->bytes))
        return object;
    slab_give(&memory_state()->physical_slab, object);
    return NULL;
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

/* Return the linear allocation that contains an address; NULL: there is none. */
static struct allocation *linear_holding(uint64_t address) {
    const struct allocation_table *table = &memory_state()->allocations;
    struct allocation *found = allocations_find(table, ALLOCATION_LINEAR, address);
    for (size_t i = 0; i < table->bucket_count && found == NULL; i++)
        for (struct allocation *at = table->buckets[i]; at != NULL; at = at->next)
            if (at->kind == ALLOCATION_LINEAR && address - at->key < at->bytes)
                found = at;
    return found;
}

struct physical *physical_within(uint64_t address, uint64_t *left) {
    struct physical *physical = physical_at(address, left);
    struct allocation *linear = physical == NULL ? linear_holding(address) : NULL;
    if (linear == NULL)
        return physical;
    *left = linear->bytes - (address - linear->key);
    if (linear->physical == NULL && (physical = slab_take(&memory_state()->physical_slab, sizeof *physical)) != NULL) {
        *physical = (struct physical){.bytes = linear->bytes, .place = linear->place, .mappings = 1, .kept = -1};
        linear->physical = physical;
    }
    return linear->physical;
}
