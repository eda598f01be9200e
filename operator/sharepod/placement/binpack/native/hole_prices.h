/* What `sharepod.placement.binpack.hole_prices` asks of C: what the free time of a GPU is worth to the requests that
 * will come.
 *
 * All arrays belong to the caller and outlive the call. Read by cffi as it stands: no preprocessor lines but the guard.
 */
#ifndef SHAREPOD_GAPS_H
#define SHAREPOD_GAPS_H

#include <stdint.h>

/* `sizes` different requests of `milli` thousandths each, ascending, of which `coming` will come; `holes`: how many
 * GPUs have 0 to 1000 thousandths free. All are multiples of `step`. `price`: what a request of each size is to pay for
 * being let in, in thousandths; where to begin, and what came out. `worth` of holes of 0 to 1000: the time of the
 * requests that fill it best, less their prices. `chance` has room for 1001 x sizes numbers, `flow` for 1001, `wanted`
 * for sizes. */
typedef struct {
    int64_t sizes;
    int64_t step;
    const int64_t *milli;
    const double *coming;
    const double *holes;
    double *price;
    double *worth;
    double *chance;
    double *flow;
    double *wanted;
} shp_market;

/* What free memory is worth beside no end of time: `worth` of 0 to 1000 thousandths of it, of `kinds` requests that
 * take `takes` (at least one) of it each and bring `gain`. */
void shp_fill_memory(int64_t kinds, const int64_t *takes, const double *gain, double *worth);

/* Moves the prices so often to where the holes want as many of each size as will come. */
void shp_settle_prices(const shp_market *market, int64_t rounds);

#endif
