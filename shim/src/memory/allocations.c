/* Allocation table: an array of buckets, each a list. The number of buckets doubles when the table has an allocation
 * per bucket. Finding an allocation takes constant time. */
#include "memory/allocations.h"

#include "base/sys.h"

static size_t bucket(const struct allocation_table *table, enum allocation_kind kind, uint64_t key) {
    uint64_t mixed = (key ^ (uint64_t)kind << 57) * 0x9e3779b97f4a7c15ull;
    return (size_t)(mixed >> 24) & (table->bucket_count - 1);
}

static void put(struct allocation_table *table, struct allocation *allocation) {
    struct allocation **at = &table->buckets[bucket(table, allocation->kind, allocation->key)];
    allocation->next = *at;
    *at = allocation;
}

/* Double the number of buckets. Return false if the table has no buckets and host memory is exhausted. With too few
 * buckets the table works, but gets slower. */
static bool grow(struct allocation_table *table) {
    struct allocation_table old = *table;
    size_t count = old.bucket_count ? old.bucket_count * 2 : 1024;
    struct allocation **buckets = sys_map(count * sizeof *buckets);
    if (buckets == NULL)
        return old.bucket_count != 0;
    table->buckets = buckets;
    table->bucket_count = count;
    for (size_t i = 0; i < old.bucket_count; i++)
        for (struct allocation *allocation = old.buckets[i], *next; allocation != NULL; allocation = next) {
            next = allocation->next;
            put(table, allocation);
        }
    sys_unmap(old.buckets, old.bucket_count * sizeof *old.buckets);
    return true;
}

struct allocation *allocations_make(struct allocation_table *table) {
    if (table->count >= table->bucket_count && !grow(table))
        return NULL;
    return slab_take(&table->slab, sizeof(struct allocation));
}

void allocations_add(struct allocation_table *table, struct allocation *allocation) {
    put(table, allocation);
    table->count++;
}

void allocations_drop(struct allocation_table *table, struct allocation *allocation) {
    slab_give(&table->slab, allocation);
}

/* Return the link to the newest allocation with this kind and key; NULL: there is none. */
static struct allocation **place_of(const struct allocation_table *table, enum allocation_kind kind, uint64_t key) {
    if (table->bucket_count == 0)
        return NULL;
    struct allocation **at = &table->buckets[bucket(table, kind, key)];
    while (*at != NULL && ((*at)->key != key || (*at)->kind != kind))
        at = &(*at)->next;
    return *at != NULL ? at : NULL;
}

struct allocation *allocations_find(const struct allocation_table *table, enum allocation_kind kind, uint64_t key) {
    struct allocation **at = place_of(table, kind, key);
    return at != NULL ? *at : NULL;
}

static struct allocation *unlink(struct allocation_table *table, struct allocation **at) {
    struct allocation *allocation = *at;
    *at = allocation->next;
    table->count--;
    return allocation;
}

struct allocation *allocations_take(struct allocation_table *table, enum allocation_kind kind, uint64_t key) {
    struct allocation **at = place_of(table, kind, key);
    return at != NULL ? unlink(table, at) : NULL;
}

struct allocation *allocations_take_of(struct allocation_table *table, CUcontext context, size_t *at) {
    for (; *at < table->bucket_count; ++*at)
        for (struct allocation **link = &table->buckets[*at]; *link != NULL; link = &(*link)->next)
            if ((*link)->context == context)
                return unlink(table, link);
    return NULL;
}

struct allocation *allocations_take_all(struct allocation_table *table,
                                        bool (*matches)(const struct allocation *, const void *of), const void *of) {
    struct allocation *list = NULL;
    for (size_t i = 0; i < table->bucket_count; i++)
        for (struct allocation **at = &table->buckets[i], *allocation; (allocation = *at) != NULL;) {
            if (!matches(allocation, of)) {
                at = &allocation->next;
                continue;
            }
            unlink(table, at);
            allocation->next = list;
            list = allocation;
        }
    return list;
}
