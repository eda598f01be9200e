/* Lookup of the hook's wrapper of an entry of the driver. */
#ifndef SHAREPOD_RESOLVE_H
#define SHAREPOD_RESOLVE_H

#include "driver/entries.h"

/* Return the wrapper of an entry; NULL: the hook only calls the entry and does not wrap it. */
void *wrapper_of(enum entry entry);

#endif
