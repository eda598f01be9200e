/* Declarations that the C files of this folder share: constants of columns.py, and the shared part of the filters.
 * cffi does not read this file. */
#ifndef SHAREPOD_COLUMNS_H
#define SHAREPOD_COLUMNS_H

#include "scores.h"

#include <stdbool.h>

static const int64_t NO_PLACE = INT64_MIN;
static const int64_t WHOLE_GPU = 1000;

enum { NO_TENANT = 0, NO_EXCLUSION = 1 }; /* numbers of exclusion labels, as in columns.py */

static inline int64_t at_most(int64_t most, int64_t value) {
    return value < most ? value : most;
}

#endif
