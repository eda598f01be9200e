/* Interface of `sharepod.placement.binpack.hole_prices` to C: shadow prices of request sizes, and the values of holes.
 *
 * All arrays belong to the caller and outlive the call. cffi reads this file as it stands: no preprocessor lines but
 * the guard and the include.
 */
#ifndef SHAREPOD_HOLE_PRICES_H
#define SHAREPOD_HOLE_PRICES_H

#include <stdint.h>

/* A cutting-stock problem: requests are cut from the free time of GPUs.
 *
 * - `sizes`: number of request sizes. `milli` (sizes): their thousandths, ascending. `coming` (sizes): expected
 *   arrivals.
 * - `holes` (1001): number of GPUs by free thousandths. All sizes are multiples of `step`.
 * - `price` (sizes): price of a request, in thousandths; start value and result.
 * - `value` (1001): value of a hole: the time of the best requests that fit into it, less their prices.
 * - Scratch: `chance` has room for 1001 x sizes numbers, `flow` for 1001, `wanted` for sizes.
 */
typedef struct {
    int64_t sizes;
    int64_t step;
    const int64_t *milli;
    const double *coming;
    const double *holes;
    double *price;
    double *value;
    double *chance;
    double *flow;
    double *wanted;
} shp_cutting_stock;

/* Write `value` (1001): the value of 0 to 1000 free thousandths of memory, as if GPU time were unlimited. There are
 * `shapes` kinds of requests: each takes `takes` thousandths (at least one) and brings `gain`. */
void shp_fill_memory(int64_t shapes, const int64_t *takes, const double *gain, double *value);

/* Run the rounds `from` to `until` of `rounds`. Each moves the prices towards those at which as many
 * requests of each size fill the holes as are expected to arrive. The last call, whose `until` is `rounds`, writes the
 * `value` of holes. */
void shp_settle_prices(const shp_cutting_stock *stock, int64_t from, int64_t until, int64_t rounds);

#endif
