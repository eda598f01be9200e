/* The table of entry points, made from entries.def: names, the hook's wrappers, the driver's functions.
 *
 * The table holds no pointers that the dynamic linker would have to relocate: that would cost every exec in the
 * container.
 */
#ifndef SHAREPOD_ENTRIES_H
#define SHAREPOD_ENTRIES_H

#include <cuda.h>
#include <stdbool.h>

#define DRIVER_FILE "libcuda.so" /* how the name of the driver's file begins */
#define EXPORT __attribute__((visibility("default")))

enum entry {
#define GATED(symbol, name) ENTRY_##symbol,
#define SEEN(symbol, name) ENTRY_##symbol,
#define CALLED(symbol) ENTRY_##symbol,
#include "entries.def"
#undef GATED
#undef SEEN
#undef CALLED
    ENTRY_COUNT
};

extern void *entries_driver[ENTRY_COUNT];

/* The driver's own function, by its prototype in cuda.h; may be NULL: a driver need not have every one. */
#define DRIVER(symbol) ((__typeof__(&symbol))entries_driver[ENTRY_##symbol])
#define HAS(symbol) (entries_driver[ENTRY_##symbol] != NULL)

/* Finds the driver's functions, once libcuda is loaded; false before that. */
bool entries_load(void);
/* The entry exported under this symbol; ENTRY_COUNT if there is none. */
enum entry entries_exported(const char *symbol);
/* The hook's wrapper of an entry; NULL for what is only called. */
void *entries_wrapper(enum entry entry);
/* The wrapper of a function of the driver; NULL if it has none. */
void *entries_wrapper_of(const void *function);
/* Whether it must never pass unseen. */
bool entries_must_pass(enum entry entry);
/* Whether cuGetProcAddress must not hand out anything but wrappers for this name. */
bool entries_gated_name(const char *name);

#endif
