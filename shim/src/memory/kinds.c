/* Direct-mapped table of pages. The page number selects the entry: one word with the page, its kind of memory, and the
 * age at which the driver was queried. An entry is valid only if its age is the present age, so incrementing the age
 * invalidates all entries. */
#include "memory/kinds.h"

#include <stdbool.h>

#include "base/sys.h"

#define KINDS_KEPT SYS_SECOND

/* Bits of a table entry, from the lowest: kind of memory (host or device), number of the page, age. The age wraps
 * around: the table is cleared before an age repeats. */
enum { REGION_BITS = 21, PAGE_BITS = 12, KIND_BITS = 2, NUMBER_BITS = 45, AGE_BITS = 64 - KIND_BITS - NUMBER_BITS };

static uint64_t page_of(uint64_t address) {
    return address >> PAGE_BITS & ((1ull << NUMBER_BITS) - 1);
}

/* Return the word of an entry, with the bits of the kind 0. */
static uint64_t tag_of(uint64_t age, uint64_t page) {
    return age << (KIND_BITS + NUMBER_BITS) | page << KIND_BITS;
}

static uint64_t place_of(uint64_t page) {
    return (page ^ page >> 14) % KINDS_PLACES; /* addresses that are 64 MiB apart have different places */
}

void kinds_forget(struct kinds *kinds) {
    uint64_t age = atomic_fetch_add(&kinds->age, 1) + 1;
    for (int i = 0; i < KINDS_PLACES && age % (1ull << AGE_BITS) == 0; i++)
        atomic_store_explicit(&kinds->places[i], 0, memory_order_relaxed);
}

/* Return the word of `hosts` that contains the region's mark. `*bit`: the mask of that mark. */
static _Atomic uint64_t *mark_of(struct kinds *kinds, uint64_t region, uint64_t *bit) {
    *bit = 1ull << region % 64;
    return &kinds->hosts[region % KINDS_REGIONS / 64];
}

void kinds_forget_host(struct kinds *kinds, uint64_t address, uint64_t bytes) {
    uint64_t last = (address + bytes) >> REGION_BITS, bit;
    for (uint64_t region = address >> REGION_BITS; region <= last; region++)
        if (atomic_load_explicit(mark_of(kinds, region, &bit), memory_order_relaxed) & bit) {
            kinds_forget(kinds);
            return;
        }
}

uint64_t kinds_age(struct kinds *kinds) {
    uint64_t now = sys_now(), due = atomic_load_explicit(&kinds->forget_at, memory_order_relaxed);
    if (now >= due && atomic_compare_exchange_strong(&kinds->forget_at, &due, now + KINDS_KEPT))
        kinds_forget(kinds);
    return atomic_load(&kinds->age);
}

enum address_kind kinds_find(const struct kinds *kinds, uint64_t age, uint64_t address) {
    uint64_t page = page_of(address), place = atomic_load(&kinds->places[place_of(page)]);
    bool found = (place ^ tag_of(age, page)) < 1 << KIND_BITS;
    return found ? (enum address_kind)(place % (1 << KIND_BITS)) : ADDRESS_UNKNOWN;
}

void kinds_note(struct kinds *kinds, uint64_t age, uint64_t address, enum address_kind kind) {
    uint64_t page = page_of(address), bit;
    _Atomic uint64_t *mark = mark_of(kinds, address >> REGION_BITS, &bit);
    if (kind == ADDRESS_HOST && !(atomic_load(mark) & bit))
        atomic_fetch_or(mark, bit);
    atomic_store(&kinds->places[place_of(page)], tag_of(age, page) | kind);
}
