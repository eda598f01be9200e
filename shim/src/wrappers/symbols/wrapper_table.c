/* The table from entry to wrapper: a switch, not an array. The compiler makes it from addresses relative to the code, so
 * that the dynamic linker has nothing to relocate.
 */
#include "wrappers/symbols/wrapper_table.h"

void *wrapper_of(enum entry entry) {
    switch (entry) {
#define WRAPPED(class, symbol, name, since, parameters) \
    case ENTRY_##symbol: return (void *)symbol;
#include "driver/entries.def"
    default: return NULL;
    }
}
