/* See entries.h. */
#include "entries.h"

#include <stdatomic.h>
#include <string.h>

#include "objects.h"

struct row {
    char symbol[40];
    char name[40];
    char kind;
};

#define GATED(symbol, name) {#symbol, #name, 'G'},
#define SEEN(symbol, name) {#symbol, #name, 'S'},
#define CALLED(symbol) {#symbol, "", 'C'},
static const struct row rows[ENTRY_COUNT] = {
#include "entries.def"
};
#undef GATED
#undef SEEN
#undef CALLED

void *entries_driver[ENTRY_COUNT];
static _Atomic bool loaded;

bool entries_load(void) {
    struct object driver;
    if (atomic_load_explicit(&loaded, memory_order_acquire))
        return true;
    if (!object_find(DRIVER_FILE, &driver))
        return false;
    for (int i = 0; i < ENTRY_COUNT; i++)
        entries_driver[i] = object_symbol(&driver, rows[i].symbol);
    atomic_store_explicit(&loaded, true, memory_order_release);
    return true;
}

enum entry entries_exported(const char *symbol) {
    if (symbol == NULL || symbol[0] != 'c' || symbol[1] != 'u')
        return ENTRY_COUNT;
    for (int i = 0; i < ENTRY_COUNT; i++)
        if (rows[i].kind != 'C' && strcmp(rows[i].symbol, symbol) == 0)
            return (enum entry)i;
    return ENTRY_COUNT;
}

/* A switch, not an array: the compiler makes it from addresses relative to the code. */
void *entries_wrapper(enum entry entry) {
    switch (entry) {
#define GATED(symbol, name) \
    case ENTRY_##symbol: return (void *)symbol;
#define SEEN(symbol, name) GATED(symbol, name)
#define CALLED(symbol)
#include "entries.def"
#undef GATED
#undef SEEN
#undef CALLED
    default: return NULL;
    }
}

void *entries_wrapper_of(const void *function) {
    for (int i = 0; i < ENTRY_COUNT; i++)
        if (rows[i].kind != 'C' && entries_driver[i] == function)
            return entries_wrapper((enum entry)i);
    return NULL;
}

bool entries_must_pass(enum entry entry) {
    return rows[entry].kind == 'G';
}

bool entries_gated_name(const char *name) {
    for (int i = 0; i < ENTRY_COUNT; i++)
        if (rows[i].kind == 'G' && strcmp(rows[i].name, name) == 0)
            return true;
    return false;
}
