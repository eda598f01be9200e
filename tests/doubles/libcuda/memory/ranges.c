/* Address ranges in a binary tree (tsearch). Stored ranges never overlap. The comparison treats overlapping ranges as
 * equal, so a search for a range of one byte finds the stored range that contains it. */
#include "memory/ranges.h"

#include <search.h>
#include <stdlib.h>

enum { LOW_START = 1 << 20 };

static void *tree;
static CUdeviceptr next_address = 0x700000000000, next_low = LOW_START;
static uint64_t next_id = 1;

static int compare(const void *a, const void *b) {
    const struct range *left = a, *right = b;
    return left->address + left->bytes <= right->address ? -1 : left->address >= right->address + right->bytes ? 1 : 0;
}

static CUdeviceptr round_up(CUdeviceptr value, uint64_t alignment) {
    return (value + alignment - 1) / alignment * alignment;
}

uint64_t fake_new_id(void) {
    return next_id++;
}

static struct range *keep(struct range range) {
    struct range *kept = malloc(sizeof *kept);
    range.id = fake_new_id();
    *kept = range;
    if (*(struct range **)tsearch(kept, &tree, compare) == kept)
        return kept;
    free(kept);
    return NULL;
}

struct range *fake_range_add(struct range range, uint64_t alignment, CUdeviceptr wanted) {
    range.address = wanted != 0 ? wanted : round_up(next_address, alignment);
    if (wanted == 0)
        next_address = range.address + range.bytes;
    else if (wanted + range.bytes > next_address && wanted < next_address + ((CUdeviceptr)1 << 44))
        next_address = wanted + range.bytes;
    return keep(range);
}

struct range *fake_range_add_low(struct range range) {
    range.address = next_low;
    next_low += range.bytes;
    return next_low >> 32 ? NULL : keep(range);
}

struct range *fake_range_holding(CUdeviceptr address) {
    struct range key = {.address = address, .bytes = 1};
    struct range **found = tfind(&key, &tree, compare);
    return found == NULL ? NULL : *found;
}

struct range *fake_range_at(CUdeviceptr address) {
    struct range *range = fake_range_holding(address);
    return range != NULL && range->address == address ? range : NULL;
}

void fake_range_remove(struct range *range) {
    tdelete(range, &tree, compare);
    free(range);
}

bool fake_range_on_device(CUdeviceptr address, uint64_t bytes) {
    struct range *range = fake_range_holding(address);
    return range != NULL && range->kind != RANGE_HOST && bytes <= range->address + range->bytes - address;
}

static const struct context *wanted_context;
static enum range_kind wanted_kind;
static struct range *found_range;

static void look(const void *node, VISIT visit, int level) {
    struct range *range = *(struct range *const *)node;
    (void)level;
    if ((visit == postorder || visit == leaf) && range->context == wanted_context && range->kind == wanted_kind)
        found_range = range;
}

struct range *fake_range_of_context(const struct context *context, enum range_kind kind) {
    wanted_context = context;
    wanted_kind = kind;
    found_range = NULL;
    twalk(tree, look);
    return found_range;
}
