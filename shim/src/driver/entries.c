/* Table of entry points. It is sorted by symbol, so lookups by symbol and by name use a binary search. The driver's
 * functions are in a second array, entries_driver. */
#include "driver/entries.h"

#include <stdatomic.h>
#include <string.h>

#include "base/elf.h"

enum { SYMBOL_BYTES = 46 }; /* bytes of the longest symbol with its final zero byte; _Static_assert checks it below */

/* Class of an entry in classes.txt. It decides whether dlsym and cuGetProcAddress may return the driver's own function.
 */
enum kind {
    KIND_gate,
    KIND_memory,
    KIND_resolve, /* calls of this class and of the two before must never bypass the hook */
    KIND_observe,
    KIND_call
};

struct row {
    char symbol[SYMBOL_BYTES];
    unsigned char name_length; /* length of the entry's name, which is the beginning of its symbol */
    unsigned char kind;
    unsigned short since; /* CUDA version since which cuGetProcAddress returns this form; 0: unknown */
};

/* Sorted by symbol. */
static const struct row rows[ENTRY_COUNT] = {
#define WRAPPED(class, symbol, name, since, parameters) {#symbol, sizeof #name - 1, KIND_##class, since},
#define CALLED(symbol, name, since, parameters) {#symbol, sizeof #name - 1, KIND_call, since},
#include "driver/entries.def"
};

#define WRAPPED(class, symbol, name, since, parameters) \
    _Static_assert(sizeof #symbol <= SYMBOL_BYTES, "SYMBOL_BYTES is too small");
#define CALLED(symbol, name, since, parameters) WRAPPED(call, symbol, name, since, parameters)
#include "driver/entries.def"

_Atomic(void *) entries_driver[ENTRY_COUNT];
static _Atomic bool loaded, settled;
/* The libcuda whose functions are in entries_driver. Threads that fill the array at the same time store the same
 * values. */
static struct {
    _Atomic(ElfW(Addr)) base;
    _Atomic(unsigned long long) unloads;
    _Atomic(const char *) strings;
    _Atomic(const char *) path;
} source;

/* Fill the table with the functions of this libcuda. */
static void load(const struct object *driver) {
    if (atomic_load_explicit(&loaded, memory_order_acquire) && driver->base == source.base &&
        driver->unloads == source.unloads)
        return;
    for (int i = 0; i < ENTRY_COUNT; i++)
        entries_driver[i] = object_symbol(driver, rows[i].symbol);
    source.base = driver->base;
    source.unloads = driver->unloads;
    source.strings = driver->strings;
    source.path = driver->path;
    atomic_store_explicit(&loaded, true, memory_order_release);
}

bool entries_load(void) {
    return atomic_load_explicit(&loaded, memory_order_acquire) || entries_reload();
}

bool entries_reload(void) {
    struct object driver;
    if (atomic_load_explicit(&settled, memory_order_acquire))
        return true;
    bool there = atomic_load_explicit(&loaded, memory_order_acquire) &&
                 object_holding(source.strings, DRIVER_FILE, &driver) && driver.base == source.base;
    if (there || object_find(DRIVER_FILE, &driver))
        load(&driver);
    else
        atomic_store_explicit(&loaded, false, memory_order_release);
    return atomic_load_explicit(&loaded, memory_order_acquire);
}

void entries_follow(const void *function) {
    struct object driver;
    if (!atomic_load_explicit(&settled, memory_order_acquire) && object_holding(function, DRIVER_FILE, &driver))
        load(&driver);
}

void entries_settle(void) {
    if (atomic_load_explicit(&settled, memory_order_acquire))
        return;
    object_pin(source.path); /* the hook calls libcuda even after the program's dlclose */
    atomic_store_explicit(&settled, true, memory_order_release);
}

/* Return the index of the first row whose symbol is this symbol or sorts after it. */
static int first_from(const char *symbol) {
    int low = 0, high = ENTRY_COUNT;
    while (low < high) {
        int middle = (low + high) / 2;
        if (strcmp(rows[middle].symbol, symbol) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Return the index of the next row with this name, from `i` on; ENTRY_COUNT: there is none. Symbols with a common
 * beginning are adjacent. */
static int next_of(int i, const char *name, size_t length) {
    for (; i < ENTRY_COUNT && strncmp(rows[i].symbol, name, length) == 0; i++)
        if (rows[i].name_length == length)
            return i;
    return ENTRY_COUNT;
}

enum entry entries_exported(const char *symbol) {
    if (symbol == NULL || symbol[0] != 'c' || symbol[1] != 'u' || symbol[2] < 'A' || symbol[2] > 'Z')
        return ENTRY_COUNT;
    int i = first_from(symbol);
    bool exported = i < ENTRY_COUNT && rows[i].kind != KIND_call && strcmp(rows[i].symbol, symbol) == 0;
    return exported ? (enum entry)i : ENTRY_COUNT;
}

enum entry entries_behind(const char *name, const void *function) {
    size_t length = strlen(name);
    for (int i = next_of(first_from(name), name, length); i < ENTRY_COUNT; i = next_of(i + 1, name, length))
        if (rows[i].kind != KIND_call && entries_driver[i] == function)
            return (enum entry)i;
    for (int i = 0; i < ENTRY_COUNT; i++) /* the driver returned the function under a name that is not part of its
                                             symbol */
        if (rows[i].kind != KIND_call && entries_driver[i] == function)
            return (enum entry)i;
    return ENTRY_COUNT;
}

/* Return true if the row is a form in which the stream NULL means the per-thread default stream. */
static bool takes_per_thread(const struct row *row) {
    size_t length = strlen(row->symbol);
    const char *end = row->symbol + length - 5;
    return length > 5 && (strcmp(end, "_ptds") == 0 || strcmp(end, "_ptsz") == 0);
}

/* If a name has no form for the per-thread default stream, the other form is used. */
enum entry entries_meant(const char *name, int version, bool per_thread) {
    size_t length = strlen(name);
    int found[2] = {ENTRY_COUNT, ENTRY_COUNT}; /* index 0: newest form for the legacy default stream that is not newer
                                                  than `version`; 1: for the per-thread one */
    if (version > CUDA_VERSION)
        return ENTRY_COUNT;
    for (int i = next_of(first_from(name), name, length); i < ENTRY_COUNT; i = next_of(i + 1, name, length)) {
        int *best = &found[takes_per_thread(&rows[i])];
        if (rows[i].since != 0 && rows[i].since <= version &&
            (*best == ENTRY_COUNT || rows[i].since > rows[*best].since))
            *best = i;
    }
    int chosen = per_thread && found[1] != ENTRY_COUNT ? found[1] : found[0];
    return chosen != ENTRY_COUNT && rows[chosen].kind != KIND_call && entries_driver[chosen] != NULL
               ? (enum entry)chosen
               : ENTRY_COUNT;
}

bool entries_must_pass(enum entry entry) {
    return rows[entry].kind <= KIND_resolve;
}

enum entry entries_gated_name(const char *name) {
    int i = next_of(first_from(name), name, strlen(name));
    return i < ENTRY_COUNT && entries_must_pass((enum entry)i) ? (enum entry)i : ENTRY_COUNT;
}

bool entries_first_refusal(enum entry entry) {
    static _Atomic bool refused[ENTRY_COUNT];
    return !atomic_exchange(&refused[entry], true);
}
