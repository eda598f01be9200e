/* A thread's table of its queues, by stream; each launch looks its queue up. It is a hash table with open addressing
 * and linear probing. A small table is in the thread's slot. A larger one is in mapped memory, and doubles whenever it
 * is half full.
 *
 * Guarantees:
 * - R9 Any stream that the thread has launched into is found by a few adjacent probes, for any number of streams. If
 *   host memory is exhausted, or two streams have the same key, `lost` is set: a queue may be missing here, and the
 *   registry is searched instead (R8, streams.h).
 * - R10 The table contains no queue that has been freed. It may contain a queue whose stream has ended; the queue's
 *   `word` is then 0.
 */
#ifndef SHAREPOD_REMEMBERED_H
#define SHAREPOD_REMEMBERED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct queue;

struct remembered_place {
    uint64_t key; /* 0: this place is free */
    struct queue *queue;
};

enum {
    REMEMBERED_OWN = 32,
    REMEMBERED_PLACE = sizeof(struct remembered_place)
}; /* number of places in the slot; bytes of a place */

/* Factor of the hash: the upper 32 bits of key times factor select the first place to search. */
#define REMEMBERED_FACTOR 0x9e3779b97f4a7c15ull

/* Table of one thread. All zero: empty. launch_entry.h reads it too. */
struct remembered {
    struct remembered_place own[REMEMBERED_OWN] __attribute__((aligned(64)));
    uint64_t away;  /* bytes from `own` to the places in use; 0: the places in use are `own` */
    uint64_t mask;  /* bytes from the first place to the last; 0: the table is empty, or a fork has zeroed the slot */
    uint32_t count; /* number of used places */
    bool lost;      /* a queue could not be stored, or was replaced by another queue */
};

/* Return the key of a stream. `stream`: its name (see stream_named), never NULL. `context`: of a default stream, if
 * several contexts may exist; else NULL. The highest bit marks keys with a context: no handle has that bit, because
 * handles are addresses of the program. */
static inline uint64_t remembered_key(const void *stream, const void *context) {
    uint64_t key = (uintptr_t)stream;
    return context == NULL ? key : (key ^ (uintptr_t)context) | 1ull << 63;
}

/* Return the place that is `bytes` bytes after the first place. */
static inline struct remembered_place *remembered_at(const struct remembered *table, uint64_t bytes) {
    return (struct remembered_place *)((uintptr_t)table->own + table->away + bytes);
}

/* Return the bytes from the first place to the place in which the search for this key starts. */
static inline uint64_t remembered_first(const struct remembered *table, uint64_t key) {
    return (key * REMEMBERED_FACTOR >> 32) & table->mask;
}

/* Return the queue with this key; NULL: none is stored. Only the slot's thread calls this. */
static inline __attribute__((always_inline)) struct queue *remembered_find(const struct remembered *table,
                                                                           uint64_t key) {
    uint64_t at = remembered_first(table, key);
    const struct remembered_place *place = remembered_at(table, at);
    while (__builtin_expect(place->key != key, 0) && place->key != 0)
        place = remembered_at(table, at = (at + REMEMBERED_PLACE) & table->mask);
    return place->queue;
}

/* Store the queue under this key; it replaces another queue with the same key. Only the slot's thread calls
 * this, and it holds the lock of struct streams. */
void remembered_add(struct remembered *table, uint64_t key, struct queue *queue);
/* Remove the queue if it is stored under this key. Only the slot's thread calls this, or another
 * thread after its exit. The caller holds the lock of struct streams. */
void remembered_remove(struct remembered *table, uint64_t key, const struct queue *queue);

#endif
