/* A hash table of pieces that the caller owns, each linked by one of its members. The caller holds one lock of its own
 * during all calls.
 *
 * Guarantees:
 * - finding, adding and removing take the same time for any number of pieces, on average;
 * - a piece keeps its place in memory.
 */
#ifndef SHAREPOD_HASHED_H
#define SHAREPOD_HASHED_H

#include <stdbool.h>
#include <stdint.h>

struct hash_link {
    struct hash_link *next; /* of the same bucket */
    uint64_t hash;
};

struct hashed {
    struct hash_link **buckets;
    uint32_t size, count; /* buckets, a power of two; pieces */
};

/* Return a hash that depends on all bits of both. */
static inline uint64_t hash_of(uint64_t one, uint64_t other) {
    uint64_t mixed = (one ^ (other * 0xbf58476d1ce4e5b9ull)) * 0x9e3779b97f4a7c15ull;
    return mixed ^ mixed >> 32;
}

/* Make room for one more piece. False: the kernel gives no memory. */
bool hashed_room(struct hashed *table);
/* Add a piece, after hashed_room. */
void hashed_add(struct hashed *table, struct hash_link *link, uint64_t hash);
void hashed_remove(struct hashed *table, struct hash_link *link);
/* Return the first piece of that hash after `link`; NULL: of all. */
struct hash_link *hashed_next(const struct hashed *table, uint64_t hash, struct hash_link *link);

#endif
