/* What the files that read the columns share: words of columns.py, and the filters. Not read by cffi. */
#ifndef SHAREPOD_ROWS_H
#define SHAREPOD_ROWS_H

#include "scores.h"

#include <stdbool.h>

static const int64_t NO_PLACE = INT64_MIN;
static const int64_t WHOLE_GPU = 1000;

enum { EMPTY = 0, PLAIN = 1 }; /* labels of cells, as in columns.py */

static inline int64_t at_most(int64_t most, int64_t value) {
    return value < most ? value : most;
}

/* Whether a pod that takes no GPU passes. */
bool shp_host_passes(const shp_columns *columns, const shp_ask *ask, int64_t row);

#endif
