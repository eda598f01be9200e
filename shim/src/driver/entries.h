/* Table of driver entry points, generated from entries.def: names, classes, and the driver's own functions.
 *
 * Guarantees:
 * - DRIVER(symbol) is the driver's own function, never the hook's wrapper.
 * - Once the program has initialized a libcuda, the table contains that libcuda's functions, and that libcuda stays
 *   loaded. Before, the table contains the functions of the libcuda in which the program last looked up a symbol,
 *   because a loader may first try stubs and older drivers.
 * - The table needs no relocation by the dynamic linker, which would slow down every exec in the container.
 */
#ifndef SHAREPOD_ENTRIES_H
#define SHAREPOD_ENTRIES_H

#include <cuda.h>
#include <stdatomic.h>
#include <stdbool.h>

#define DRIVER_FILE "libcuda.so" /* beginning of the driver's file name */
#define EXPORT __attribute__((visibility("default")))

enum entry {
#define WRAPPED(class, symbol, name, since, parameters) ENTRY_##symbol,
#define CALLED(symbol, name, since, parameters) ENTRY_##symbol,
#include "driver/entries.def"
    ENTRY_COUNT
};

/* Prototypes of all entry points, because newer releases of cuda.h lack some. */
#define WRAPPED(class, symbol, name, since, parameters) CUresult symbol parameters;
#define CALLED(symbol, name, since, parameters) CUresult symbol parameters;
#include "driver/entries.def"

/* The driver's functions by entry; NULL: this driver does not have the entry. Threads that load the table at the same
 * time store the same values. */
extern _Atomic(void *) entries_driver[ENTRY_COUNT];

/* The driver's own function with its prototype; NULL: this driver does not have it. HAS(symbol) is true if the driver
 * has it.
 */
#define DRIVER(symbol) \
    ((__typeof__(&symbol))atomic_load_explicit(&entries_driver[ENTRY_##symbol], memory_order_relaxed))
#define HAS(symbol) (atomic_load_explicit(&entries_driver[ENTRY_##symbol], memory_order_relaxed) != NULL)

/* Fill the table with the functions of the loaded libcuda. Return false if no libcuda is loaded yet. Later calls take
 * no lock. */
bool entries_load(void);
/* As entries_load. While no libcuda is initialized, fill the table again if its libcuda was unloaded. */
bool entries_reload(void);
/* If no libcuda is initialized yet, and the function belongs to a libcuda, fill the table from that libcuda. */
void entries_follow(const void *function);
/* Fix the table and keep its libcuda loaded, because the program has initialized it. Takes the dynamic linker's lock.
 */
void entries_settle(void);
/* Return the entry that the hook exports under this symbol; ENTRY_COUNT: there is none. */
enum entry entries_exported(const char *symbol);
/* Return the entry of a function that the driver's cuGetProcAddress returned for this name; ENTRY_COUNT: the hook does
 * not wrap it. */
enum entry entries_behind(const char *name, const void *function);
/* Return the wrapped entry for a name, a CUDA version and the flags of cuGetProcAddress. Return ENTRY_COUNT if there is
 * none. Return it also if the version is newer than the table: the table may then lack the form that the driver would
 * return. */
enum entry entries_meant(const char *name, int version, bool per_thread);
/* Return whether calls of the entry must always pass the hook, because the entry launches, allocates or resolves
 * symbols. */
bool entries_must_pass(enum entry entry);
/* Return the first entry with this name if a program must never get the driver's own function for it, else ENTRY_COUNT.
 */
enum entry entries_gated_name(const char *name);

/* Return true in the first call for this entry only, so that the message about its refusal is written once. */
bool entries_first_refusal(enum entry entry);

#endif
