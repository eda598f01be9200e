/* The hook's wrapper of each entry point. */
#ifndef SHAREPOD_RESOLVE_H
#define SHAREPOD_RESOLVE_H

#include "driver/entries.h"

/* Returns the wrapper of an entry; NULL for what the hook only calls. */
void *wrapper_of(enum entry entry);

#endif
