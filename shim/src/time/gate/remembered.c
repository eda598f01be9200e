/* The table has open addressing: a key is in its first place, or in the first free one after it. Removal leaves no gap
 * between a key and its first place: later keys move up. */
#include "time/gate/remembered.h"

#include "base/sys.h"

enum { FIRST_BITS = 8 }; /* of the table: a page */

static uint64_t size_of(const struct remembered *table) {
    return table->places == NULL ? 0 : (UINT64_MAX >> table->shift) + 1;
}

static struct remembered_place *own_place(struct remembered *table, uint64_t key) {
    return &table->own[remembered_hash(key) >> (64 - REMEMBERED_OWN_BITS)];
}

static uint64_t first_place(const struct remembered *table, uint64_t key) {
    return remembered_hash(key) >> table->shift;
}

/* Return the place of a key in the table, or the free one where it belongs. */
static uint64_t find_place(const struct remembered *table, uint64_t key) {
    uint64_t place = first_place(table, key);
    while (table->places[place].key != 0 && table->places[place].key != key)
        place = remembered_next(table, place);
    return place;
}

static void move(struct remembered *table, struct remembered_place *from) {
    if (from->key != 0)
        table->places[find_place(table, from->key)] = *from;
    *from = (struct remembered_place){0};
}

/* Move all to a larger table. False: the kernel gives no memory. */
static bool grow(struct remembered *table) {
    uint64_t size = size_of(table), larger = size == 0 ? 1 << FIRST_BITS : 2 * size;
    struct remembered_place *before = table->places, *places = sys_map(larger * sizeof *places);
    if (places == NULL)
        return false;
    table->places = places;
    table->shift = size == 0 ? 64 - FIRST_BITS : table->shift - 1;
    for (uint64_t i = 0; i < size; i++)
        move(table, &before[i]);
    for (int i = 0; i < REMEMBERED_OWN; i++)
        move(table, &table->own[i]);
    sys_unmap(before, size * sizeof *places);
    return true;
}

void remembered_add(struct remembered *table, uint64_t key, struct queue *queue) {
    struct remembered_place *place = own_place(table, key);
    bool in_slot = table->places == NULL && (place->key == 0 || place->key == key);
    if (!in_slot && 2 * (table->count + 1ull) > size_of(table) && !grow(table)) {
        table->lost = true;
        return;
    }
    if (!in_slot)
        place = &table->places[find_place(table, key)];
    table->count += place->key == 0;
    table->lost |= place->key != 0;
    *place = (struct remembered_place){key, queue};
}

void remembered_remove(struct remembered *table, uint64_t key, const struct queue *queue) {
    struct remembered_place *places = table->places, *own = own_place(table, key);
    uint64_t gap = places == NULL ? 0 : find_place(table, key), mask = size_of(table) - 1;
    if ((places == NULL ? own : &places[gap])->key != key || (places == NULL ? own : &places[gap])->queue != queue)
        return;
    table->count--;
    if (places == NULL) {
        *own = (struct remembered_place){0};
        return;
    }
    for (uint64_t at = remembered_next(table, gap); places[at].key != 0; at = remembered_next(table, at))
        if (((at - first_place(table, places[at].key)) & mask) >= ((at - gap) & mask)) {
            places[gap] = places[at];
            gap = at;
        }
    places[gap] = (struct remembered_place){0};
}
