/* Shadow prices of request sizes, and the values of holes at these prices.
 *
 * The prices are the dual prices of the cutting-stock problem (Gilmore and Gomory, 1961), found by iterating supply and
 * demand.
 *
 * Guarantees: the functions write only `price`, `value` and the scratch of their argument, and allocate nothing. One
 * round takes holes x sizes steps.
 */
#include "hole_prices.h"

#include <math.h>
#include <string.h>

static const int64_t WHOLE_GPU = 1000;

/* Sharpness of the choice between ways to fill a hole, in thousandths of a GPU: a way that is better by this much is
 * e times as likely. */
static const double CHOICE = 15.0;
/* Change of a price in one round, in thousandths of a GPU, for an excess of demand by the factor e. FINE applies in
 * the second half of the rounds. */
static const double FAST = 4.5, FINE = 1.35;
/* Weight of leaving a hole unfilled, relative to an equally good request. */
static const double LEFT_AS_IT_IS = 1e-3;
/* Requests added to demand and arrivals, so that small numbers hardly move a price. */
static const double UNSURE = 0.5;

/* Compute the value of each hole, and the probability that a request of each size is put into it next. */
static void fill_holes(const shp_cutting_stock *stock) {
    double *value = stock->value;
    for (int64_t free = 0; free <= WHOLE_GPU; free += stock->step) {
        double *chance = stock->chance + free * stock->sizes;
        double best = 0.0;
        int64_t fitting = 0;
        for (; fitting < stock->sizes && stock->milli[fitting] <= free; fitting++) {
            int64_t milli = stock->milli[fitting];
            chance[fitting] = (double)milli - stock->price[fitting] + value[free - milli];
            best = fmax(best, chance[fitting]);
        }
        double total = LEFT_AS_IT_IS * exp(-best / CHOICE);
        for (int64_t size = 0; size < fitting; size++) {
            chance[size] = exp((chance[size] - best) / CHOICE) * stock->coming[size];
            total += chance[size];
        }
        for (int64_t size = 0; size < fitting; size++)
            chance[size] = total > 0.0 ? chance[size] / total : 0.0;
        value[free] = best;
    }
}

/* Count, for each size, the requests that would fill all holes at the present prices. A request leaves a smaller hole,
 * which is filled in turn. */
static void count_wanted(const shp_cutting_stock *stock) {
    double *flow = stock->flow;
    memcpy(flow, stock->holes, (size_t)(WHOLE_GPU + 1) * sizeof *flow);
    memset(stock->wanted, 0, (size_t)stock->sizes * sizeof *stock->wanted);
    for (int64_t free = WHOLE_GPU - WHOLE_GPU % stock->step; free > 0; free -= stock->step) {
        const double *chance = stock->chance + free * stock->sizes;
        for (int64_t size = 0; flow[free] > 0.0 && size < stock->sizes && stock->milli[size] <= free; size++) {
            double comes = flow[free] * chance[size];
            stock->wanted[size] += comes;
            flow[free - stock->milli[size]] += comes;
        }
    }
}

static void move_prices(const shp_cutting_stock *stock, double speed) {
    for (int64_t size = 0; size < stock->sizes; size++) {
        double too_many = log((stock->wanted[size] + UNSURE) / (stock->coming[size] + UNSURE));
        double price = stock->price[size] + speed * too_many;
        stock->price[size] = fmax(-(double)WHOLE_GPU, fmin(price, (double)stock->milli[size]));
    }
}

void shp_settle_prices(const shp_cutting_stock *stock, int64_t from, int64_t until, int64_t rounds) {
    for (int64_t round = from; round < until; round++) {
        fill_holes(stock);
        count_wanted(stock);
        move_prices(stock, round < rounds / 2 ? FAST : FINE);
    }
    if (until < rounds)
        return;
    fill_holes(stock);
    for (int64_t free = 0; free <= WHOLE_GPU; free++)
        stock->value[free] = stock->value[free - free % stock->step];
}

void shp_fill_memory(int64_t shapes, const int64_t *takes, const double *gain, double *value) {
    value[0] = 0.0;
    for (int64_t free = 1; free <= WHOLE_GPU; free++) {
        value[free] = value[free - 1];
        for (int64_t shape = 0; shape < shapes; shape++)
            if (takes[shape] <= free)
                value[free] = fmax(value[free], gain[shape] + value[free - takes[shape]]);
    }
}
