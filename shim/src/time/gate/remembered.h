/* The queues that a thread has launched into, by stream, which each launch looks up. They are in the slot while each
 * stream has a place of its own there. Otherwise they are in a table of the thread's own, in memory from the kernel,
 * which doubles whenever it is half full.
 *
 * Guarantees:
 * - R9 every stream that the thread has launched into is found, among any number, by one probe of the slot, and one or
 *   a few adjacent probes of the table. Where the kernel gives no memory for the table, or two streams have one key, a
 *   queue is `lost`, and the registry is asked (R8).
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

enum { REMEMBERED_OWN_BITS = 5, REMEMBERED_OWN = 1 << REMEMBERED_OWN_BITS }; /* places in the slot */

/* Zeroed: empty. */
struct remembered {
    struct remembered_place *places; /* the table, never full; NULL: there is none yet, or a fork has wiped the slot */
    uint32_t shift;                  /* 64 less the logarithm of their number */
    uint32_t count;                  /* used places */
    bool lost;                       /* a queue was not put in, or made way for another */
    struct remembered_place own[REMEMBERED_OWN] __attribute__((aligned(64))); /* all free once there is a table */
};

/* Return the key of a stream, by its one name, which is never NULL. `context`: of a default stream, if there may be
 * several contexts; else NULL. Handles are addresses of the program: the highest bit is free. */
static inline uint64_t remembered_key(const void *stream, const void *context) {
    uint64_t key = (uintptr_t)stream;
    return context == NULL ? key : (key ^ (uintptr_t)context) | 1ull << 63;
}

/* Return a number whose highest bits say where a key belongs: all bits of the key count. */
static inline uint64_t remembered_hash(uint64_t key) {
    return key * 0x9e3779b97f4a7c15ull;
}

/* Return the place of the table after that one. */
static inline uint64_t remembered_next(const struct remembered *table, uint64_t place) {
    return (place + 1) & (UINT64_MAX >> table->shift);
}

/* Return the queue of a key; NULL: none is remembered. For the slot's thread. */
static inline __attribute__((always_inline)) struct queue *remembered_find(const struct remembered *table,
                                                                           uint64_t key) {
    uint64_t hash = remembered_hash(key);
    const struct remembered_place *own = &table->own[hash >> (64 - REMEMBERED_OWN_BITS)], *places = table->places;
    if (__builtin_expect(own->key == key, 1)) { /* most threads have few streams */
        if (own->queue == NULL)
            __builtin_unreachable(); /* the key is not 0 */
        return own->queue;
    }
    if (places == NULL)
        return NULL;
    uint64_t place = hash >> table->shift;
    while (places[place].key != key && places[place].key != 0)
        place = remembered_next(table, place);
    return places[place].queue;
}

/* Remember the queue under that key, instead of another one of the same key. With the lock of struct streams, in the
 * slot's thread. */
void remembered_add(struct remembered *table, uint64_t key, struct queue *queue);
/* Forget the queue, if it is remembered under that key. With that lock, in the slot's thread, or after its exit. */
void remembered_remove(struct remembered *table, uint64_t key, const struct queue *queue);

#endif
