/* The table of driver entry points, made from entries.def: names, classes, and the driver's own functions.
 *
 * Guarantees:
 * - DRIVER(symbol) is the driver's own function, never the hook's wrapper;
 * - once the program has initialized a libcuda, the table is of that one, which stays loaded; before, it follows the
 *   libcuda that the program asks for symbols, since a loader may try stubs and older drivers first;
 * - the table holds no pointer that the dynamic linker would have to relocate: that would cost every exec in the
 *   container.
 */
#ifndef SHAREPOD_ENTRIES_H
#define SHAREPOD_ENTRIES_H

#include <cuda.h>
#include <stdatomic.h>
#include <stdbool.h>

#define DRIVER_FILE "libcuda.so" /* the beginning of the driver's file name */
#define EXPORT __attribute__((visibility("default")))

enum entry {
#define WRAPPED(class, symbol, name, since, parameters) ENTRY_##symbol,
#define CALLED(symbol, name, since, parameters) ENTRY_##symbol,
#include "driver/entries.def"
    ENTRY_COUNT
};

/* Prototypes of all entry points: cuda.h declares most of them already, a newer one no longer declares some. */
#define WRAPPED(class, symbol, name, since, parameters) CUresult symbol parameters;
#define CALLED(symbol, name, since, parameters) CUresult symbol parameters;
#include "driver/entries.def"

/* The driver's functions by entry; NULL: this driver has none. Threads that load at once store the same. */
extern _Atomic(void *) entries_driver[ENTRY_COUNT];

/* The driver's own function, by its prototype. NULL: this driver has none, see HAS. */
#define DRIVER(symbol) \
    ((__typeof__(&symbol))atomic_load_explicit(&entries_driver[ENTRY_##symbol], memory_order_relaxed))
#define HAS(symbol) (atomic_load_explicit(&entries_driver[ENTRY_##symbol], memory_order_relaxed) != NULL)

/* Find the driver's functions. False: libcuda is not loaded yet. Takes no lock once they are found. */
bool entries_load(void);
/* The same; while no libcuda is initialized, find out whether that of the table is loaded still. */
bool entries_reload(void);
/* While no libcuda is initialized, make the table one of the libcuda that holds this function, if any does. */
void entries_follow(const void *function);
/* Keep the table as it is, and its libcuda loaded: the program has initialized it. Takes the loader's lock. */
void entries_settle(void);
/* Return the entry that the hook exports under this symbol; ENTRY_COUNT: none. */
enum entry entries_exported(const char *symbol);
/* Return the entry of a function that the driver hands out under this name; ENTRY_COUNT: it is not wrapped. */
enum entry entries_behind(const char *name, const void *function);
/* Return the wrapped entry for a name, a version of CUDA and the flags of cuGetProcAddress; ENTRY_COUNT: none, or a
 * version newer than the table, whose forms it may not know. */
enum entry entries_meant(const char *name, int version, bool per_thread);
/* Return whether the entry must never reach the driver unseen: it launches, allocates or resolves. */
bool entries_must_pass(enum entry entry);
/* Return the first entry of this name if only wrappers may be handed out for it, else ENTRY_COUNT. */
enum entry entries_gated_name(const char *name);

/* Return whether the entry is refused for the first time: its message is written once. */
bool entries_first_refusal(enum entry entry);

#endif
