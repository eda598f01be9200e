/* The queues that a thread has launched into, by stream, which each launch looks up: an open hash table with linear
 * probing. It is in the slot while a few streams are known, then in memory from the kernel, and doubles whenever it is
 * half full.
 *
 * Guarantees:
 * - R9 every stream that the thread has launched into is found, among any number, by one or a few adjacent probes.
 * Where the kernel gives no memory for the table, or two streams have one key, a queue is `lost`, and the registry is
 * asked (R8).
 * - R10 it contains no queue that has been freed. A queue whose stream has ended may be in it: its `word` shows that.
 */
#ifndef SHAREPOD_REMEMBERED_H
#define SHAREPOD_REMEMBERED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct queue;

struct remembered_place {
    uint64_t key; /* 0: free */
    struct queue *queue;
};

enum { REMEMBERED_OWN = 32, REMEMBERED_PLACE = sizeof(struct remembered_place) }; /* places in the slot; bytes of one */

/* Factor of the hash. Bits 32 and up of the product say where a key belongs. */
#define REMEMBERED_FACTOR 0x9e3779b97f4a7c15ull

/* Zeroed: empty. Also read by launch_entry.h. */
struct remembered {
    struct remembered_place own[REMEMBERED_OWN] __attribute__((aligned(64)));
    uint64_t away; /* bytes from `own` to the places in use; 0: `own` itself */
    uint64_t mask; /* bytes from the first place to the last; 0: nothing was remembered, or a fork has wiped the slot */
    uint32_t count; /* used places */
    bool lost;      /* a queue was not put in, or made way for another */
};

/* Return the key of a stream, by its one name, which is never NULL. `context`: of a default stream, if there may be
 * several contexts; else NULL. Handles are addresses of the program: the highest bit is free. */
static inline uint64_t remembered_key(const void *stream, const void *context) {
    uint64_t key = (uintptr_t)stream;
    return context == NULL ? key : (key ^ (uintptr_t)context) | 1ull << 63;
}

/* Return the place at so many bytes from the first. */
static inline struct remembered_place *remembered_at(const struct remembered *table, uint64_t bytes) {
    return (struct remembered_place *)((uintptr_t)table->own + table->away + bytes);
}

/* Return where a key belongs, in bytes from the first place. */
static inline uint64_t remembered_first(const struct remembered *table, uint64_t key) {
    return (key * REMEMBERED_FACTOR >> 32) & table->mask;
}

/* Return the queue of a key; NULL: none is remembered. For the slot's thread. */
static inline __attribute__((always_inline)) struct queue *remembered_find(const struct remembered *table,
                                                                           uint64_t key) {
    uint64_t at = remembered_first(table, key);
    const struct remembered_place *place = remembered_at(table, at);
    while (__builtin_expect(place->key != key, 0) && place->key != 0)
        place = remembered_at(table, at = (at + REMEMBERED_PLACE) & table->mask);
    return place->queue;
}

/* Remember the queue under that key, instead of another one of the same key. With the lock of struct streams, in the
 * slot's thread. */
void remembered_add(struct remembered *table, uint64_t key, struct queue *queue);
/* Forget the queue, if it is remembered under that key. With that lock, in the slot's thread, or after its exit. */
void remembered_remove(struct remembered *table, uint64_t key, const struct queue *queue);

#endif
