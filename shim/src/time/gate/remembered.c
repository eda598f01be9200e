/* After a removal, later keys move up, so that no free place is between a key and the place where its search starts. */
#include "time/gate/remembered.h"

#include "base/sys.h"

enum { FIRST = 256 }; /* places of the first table outside the slot: one page */

static uint64_t next(const struct remembered *table, uint64_t at) {
    return (at + REMEMBERED_PLACE) & table->mask;
}

/* Return the bytes from the first place to the key's place, or to the free place where the key belongs. */
static uint64_t find(const struct remembered *table, uint64_t key) {
    uint64_t at = remembered_first(table, key);
    while (remembered_at(table, at)->key != 0 && remembered_at(table, at)->key != key)
        at = next(table, at);
    return at;
}

/* Move all keys to a larger table. Return false if host memory is exhausted. */
static bool grow(struct remembered *table) {
    bool outside = table->away != 0;
    uint64_t bytes = table->mask + REMEMBERED_PLACE, larger = outside ? 2 * bytes : FIRST * REMEMBERED_PLACE;
    struct remembered_place *from = remembered_at(table, 0), *places = sys_map(larger);
    if (places == NULL)
        return false;
    table->away = (uintptr_t)places - (uintptr_t)table->own;
    table->mask = larger - REMEMBERED_PLACE;
    for (uint64_t i = 0; i < bytes / REMEMBERED_PLACE; i++) {
        if (from[i].key != 0)
            *remembered_at(table, find(table, from[i].key)) = from[i];
        from[i] = (struct remembered_place){0};
    }
    if (outside)
        sys_unmap(from, bytes);
    return true;
}

void remembered_add(struct remembered *table, uint64_t key, struct queue *queue) {
    if (table->mask == 0)
        table->mask = (REMEMBERED_OWN - 1) * REMEMBERED_PLACE;
    struct remembered_place *place = remembered_at(table, find(table, key));
    if (place->key == 0) {
        if (2 * (table->count + 1ull) * REMEMBERED_PLACE > table->mask + REMEMBERED_PLACE && !grow(table)) {
            table->lost = true;
            return;
        }
        place = remembered_at(table, find(table, key));
    }
    table->count += place->key == 0;
    table->lost |= place->key != 0;
    *place = (struct remembered_place){key, queue};
}

void remembered_remove(struct remembered *table, uint64_t key, const struct queue *queue) {
    uint64_t gap = find(table, key);
    if (remembered_at(table, gap)->key != key || remembered_at(table, gap)->queue != queue)
        return;
    table->count--;
    for (uint64_t at = next(table, gap), used; (used = remembered_at(table, at)->key) != 0; at = next(table, at))
        if (((at - remembered_first(table, used)) & table->mask) >= ((at - gap) & table->mask)) {
            *remembered_at(table, gap) = *remembered_at(table, at);
            gap = at;
        }
    *remembered_at(table, gap) = (struct remembered_place){0};
}
