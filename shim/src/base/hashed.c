/* The number of buckets doubles when the table has as many entries as buckets. If there is no memory for that, the
 * buckets' lists get longer, so lookups get slower. */
#include "base/hashed.h"

#include <stddef.h>

#include "base/sys.h"

enum { HASHED_FIRST = 512 }; /* buckets: a page */

bool hashed_room(struct hashed *table) {
    if (table->count < table->size)
        return true;
    uint32_t size = table->size ? table->size * 2 : HASHED_FIRST;
    struct hash_link **buckets = sys_map(size * sizeof *buckets);
    if (buckets == NULL)
        return table->size > 0;
    for (uint32_t i = 0; i < table->size; i++)
        for (struct hash_link *link = table->buckets[i], *next; link != NULL; link = next) {
            next = link->next;
            link->next = buckets[link->hash & (size - 1)];
            buckets[link->hash & (size - 1)] = link;
        }
    sys_unmap(table->buckets, table->size * sizeof *buckets);
    table->buckets = buckets;
    table->size = size;
    return true;
}

void hashed_add(struct hashed *table, struct hash_link *link, uint64_t hash) {
    struct hash_link **bucket = &table->buckets[hash & (table->size - 1)];
    *link = (struct hash_link){.next = *bucket, .hash = hash};
    *bucket = link;
    table->count++;
}

void hashed_remove(struct hashed *table, struct hash_link *link) {
    struct hash_link **at = &table->buckets[link->hash & (table->size - 1)];
    while (*at != link)
        at = &(*at)->next;
    *at = link->next;
    table->count--;
}

struct hash_link *hashed_next(const struct hashed *table, uint64_t hash, struct hash_link *link) {
    if (table->size == 0)
        return NULL;
    link = link != NULL ? link->next : table->buckets[hash & (table->size - 1)];
    while (link != NULL && link->hash != hash)
        link = link->next;
    return link;
}
