/* Hash table. The caller owns the entries; each entry has a member `struct hash_link`. During all calls the caller
 * holds a lock of its own, always the same one.
 *
 * Guarantees:
 * - Finding, adding and removing an entry takes the same time on average for any number of entries.
 * - An entry keeps its address.
 */
#ifndef SHAREPOD_HASHED_H
#define SHAREPOD_HASHED_H

#include <stdbool.h>
#include <stdint.h>

struct hash_link {
    struct hash_link *next; /* next link of the same bucket */
    uint64_t hash;
};

struct hashed {
    struct hash_link **buckets;
    uint32_t size, count; /* number of buckets, a power of two; number of entries */
};

/* Return a hash that depends on all bits of both numbers. */
static inline uint64_t hash_of(uint64_t one, uint64_t other) {
    uint64_t mixed = (one ^ (other * 0xbf58476d1ce4e5b9ull)) * 0x9e3779b97f4a7c15ull;
    return mixed ^ mixed >> 32;
}

/* Make room for one more entry. Return false if host memory is exhausted. */
bool hashed_room(struct hashed *table);
/* Add an entry. hashed_room must have returned true before. */
void hashed_add(struct hashed *table, struct hash_link *link, uint64_t hash);
void hashed_remove(struct hashed *table, struct hash_link *link);
/* Return the next entry with this hash after `link`; `link` NULL: the first one. Return NULL after the last one.
 * Different keys may have the same hash, so the caller compares keys. */
struct hash_link *hashed_next(const struct hashed *table, uint64_t hash, struct hash_link *link);

#endif
