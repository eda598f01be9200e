/* See holdings.h. */
#include "memory/allocations.h"

#include "base/sys.h"

static size_t bucket(const struct holdings *holdings, enum holding_kind kind, uint64_t key) {
    uint64_t mixed = (key ^ (uint64_t)kind << 57) * 0x9e3779b97f4a7c15ull;
    return (size_t)(mixed >> 24) & (holdings->bucket_count - 1);
}

static void put(struct holdings *holdings, struct holding *holding) {
    struct holding **at = &holdings->buckets[bucket(holdings, holding->kind, holding->key)];
    holding->next = *at;
    *at = holding;
}

/* Twice the buckets, if the kernel gives them; without them it only gets slower. */
static bool grow(struct holdings *holdings) {
    struct holdings old = *holdings;
    size_t count = old.bucket_count ? old.bucket_count * 2 : 1024;
    struct holding **buckets = sys_map(count * sizeof *buckets);
    if (buckets == NULL)
        return old.bucket_count != 0;
    holdings->buckets = buckets;
    holdings->bucket_count = count;
    for (size_t i = 0; i < old.bucket_count; i++)
        for (struct holding *holding = old.buckets[i], *next; holding != NULL; holding = next) {
            next = holding->next;
            put(holdings, holding);
        }
    sys_unmap(old.buckets, old.bucket_count * sizeof *old.buckets);
    return true;
}

struct holding *holdings_make(struct holdings *holdings) {
    if (holdings->count >= holdings->bucket_count && !grow(holdings))
        return NULL;
    return slab_take(&holdings->slab, sizeof(struct holding));
}

void holdings_add(struct holdings *holdings, struct holding *holding) {
    put(holdings, holding);
    holdings->count++;
}

void holdings_drop(struct holdings *holdings, struct holding *holding) {
    slab_give(&holdings->slab, holding);
}

static struct holding **place_of(const struct holdings *holdings, enum holding_kind kind, uint64_t key) {
    if (holdings->bucket_count == 0)
        return NULL;
    struct holding **at = &holdings->buckets[bucket(holdings, kind, key)];
    while (*at != NULL && ((*at)->key != key || (*at)->kind != kind))
        at = &(*at)->next;
    return *at != NULL ? at : NULL;
}

struct holding *holdings_find(const struct holdings *holdings, enum holding_kind kind, uint64_t key) {
    struct holding **at = place_of(holdings, kind, key);
    return at != NULL ? *at : NULL;
}

static struct holding *unlink(struct holdings *holdings, struct holding **at) {
    struct holding *holding = *at;
    *at = holding->next;
    holdings->count--;
    return holding;
}

struct holding *holdings_take(struct holdings *holdings, enum holding_kind kind, uint64_t key) {
    struct holding **at = place_of(holdings, kind, key);
    return at != NULL ? unlink(holdings, at) : NULL;
}

struct holding *holdings_take_of(struct holdings *holdings, CUcontext context, size_t *at) {
    for (; *at < holdings->bucket_count; ++*at)
        for (struct holding **link = &holdings->buckets[*at]; *link != NULL; link = &(*link)->next)
            if ((*link)->context == context)
                return unlink(holdings, link);
    return NULL;
}

struct holding *holdings_take_all(struct holdings *holdings, bool (*matches)(const struct holding *, const void *of),
                                  const void *of) {
    struct holding *list = NULL;
    for (size_t i = 0; i < holdings->bucket_count; i++)
        for (struct holding **at = &holdings->buckets[i], *holding; (holding = *at) != NULL;) {
            if (!matches(holding, of)) {
                at = &holding->next;
                continue;
            }
            unlink(holdings, at);
            holding->next = list;
            list = holding;
        }
    return list;
}
