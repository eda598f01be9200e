/* See allocations.h. */
#include "allocations.h"

#include "sys.h"

static size_t place_of(const struct memory *memory, CUdeviceptr address) {
    return (size_t)((address >> 9) * 0x9e3779b97f4a7c15ull >> 20) & (memory->capacity - 1);
}

static void put(struct memory *memory, struct allocation allocation) {
    size_t at = place_of(memory, allocation.address);
    while (memory->table[at].address != 0)
        at = (at + 1) & (memory->capacity - 1);
    memory->table[at] = allocation;
}

bool allocations_grow(struct memory *memory) {
    if (memory->capacity != 0 &&
        memory->count + 64 < memory->capacity / 2) /* room for those that others are about to add */
        return true;
    struct memory old = *memory;
    size_t capacity = old.capacity ? old.capacity * 2 : 1024;
    struct allocation *table = sys_map(capacity * sizeof *table);
    if (table == NULL)
        return false;
    memory->table = table;
    memory->capacity = capacity;
    for (size_t i = 0; i < old.capacity; i++)
        if (old.table[i].address != 0)
            put(memory, old.table[i]);
    sys_unmap(old.table, old.capacity * sizeof *old.table);
    return true;
}

void allocations_add(struct memory *memory, struct allocation allocation) {
    put(memory, allocation);
    memory->count++;
}

bool allocations_take(struct memory *memory, CUdeviceptr address, struct allocation *allocation) {
    if (memory->capacity == 0 || address == 0)
        return false;
    size_t mask = memory->capacity - 1, at = place_of(memory, address);
    while (memory->table[at].address != address) {
        if (memory->table[at].address == 0)
            return false;
        at = (at + 1) & mask;
    }
    *allocation = memory->table[at];
    memory->count--;
    /* Close the gap: move up what would not be found past it. */
    for (size_t gap = at, next = (at + 1) & mask;; next = (next + 1) & mask) {
        if (memory->table[next].address == 0) {
            memory->table[gap].address = 0;
            return true;
        }
        size_t home = place_of(memory, memory->table[next].address);
        if (((next - home) & mask) >= ((next - gap) & mask)) {
            memory->table[gap] = memory->table[next];
            gap = next;
        }
    }
}
