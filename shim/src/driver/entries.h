/* The table of entry points, made from entries.def: names, the hook's wrappers, the driver's functions.
 *
 * The table holds no pointers that the dynamic linker would have to relocate: that would cost every exec in the
 * container.
 */
#ifndef SHAREPOD_ENTRIES_H
#define SHAREPOD_ENTRIES_H

#include <cuda.h>
#include <stdatomic.h>
#include <stdbool.h>

#define DRIVER_FILE "libcuda.so" /* how the name of the driver's file begins */
#define EXPORT __attribute__((visibility("default")))

enum entry {
#define WRAPPED(class, symbol, name, since, parameters) ENTRY_##symbol,
#define CALLED(symbol, name, since, parameters) ENTRY_##symbol,
#include "driver/entries.def"
    ENTRY_COUNT
};

/* What cuda.h declares already, and what a newer one no longer does. */
#define WRAPPED(class, symbol, name, since, parameters) CUresult symbol parameters;
#define CALLED(symbol, name, since, parameters) CUresult symbol parameters;
#include "driver/entries.def"

/* Filled in by whichever thread comes first, by several at once with the same. */
extern _Atomic(void *) entries_driver[ENTRY_COUNT];

/* The driver's own function, by its prototype; may be NULL: a driver need not have every one. */
#define DRIVER(symbol) \
    ((__typeof__(&symbol))atomic_load_explicit(&entries_driver[ENTRY_##symbol], memory_order_relaxed))
#define HAS(symbol) (atomic_load_explicit(&entries_driver[ENTRY_##symbol], memory_order_relaxed) != NULL)

/* Finds the driver's functions, once libcuda is loaded; false before that. */
bool entries_load(void);
/* The entry exported under this symbol; ENTRY_COUNT if there is none. */
enum entry entries_exported(const char *symbol);
/* The entry behind a function of the driver that it hands out under this name; ENTRY_COUNT if it is not wrapped. */
enum entry entries_behind(const char *name, const void *function);
/* Whether it must never pass unseen. */
bool entries_must_pass(enum entry entry);
/* The first entry of this name, if none but wrappers may be handed out for it; else ENTRY_COUNT. */
enum entry entries_gated_name(const char *name);

/* Whether it is refused for the first time: what is said of it is said once. */
bool entries_first_refusal(enum entry entry);

#endif
