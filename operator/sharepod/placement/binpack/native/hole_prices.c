/* What holes are worth: prices of sizes at which the holes want what will come.
 *
 * Guarantees: writes `price`, `worth` and the scratch of the market and nothing else, allocates nothing, and takes
 * rounds x holes x sizes steps. The prices are the dual prices of the cutting stock problem (Gilmore and Gomory, 1961),
 * found by letting supply and demand move them.
 */
#include "hole_prices.h"

#include <math.h>
#include <string.h>

static const int64_t WHOLE_GPU = 1000;

/* Thousandths: how clearly the better of two ways to fill a hole is taken. */
static const double CHOICE = 15.0;
/* How fast a price follows, in thousandths per e-fold of too much; finer in the second half of the rounds. */
static const double FAST = 4.5, FINE = 1.35;
/* How seldom a hole is left as it is where a request would do as well. */
static const double LEFT_AS_IT_IS = 1e-3;
/* Requests that more or less are not worth a price. */
static const double UNSURE = 0.5;

/* The best way to go on with each hole, and how likely each size is to come into it. */
static void fill_holes(const shp_market *market) {
    double *worth = market->worth;
    for (int64_t free = 0; free <= WHOLE_GPU; free += market->step) {
        double *chance = market->chance + free * market->sizes;
        double best = 0.0;
        int64_t fitting = 0;
        for (; fitting < market->sizes && market->milli[fitting] <= free; fitting++) {
            int64_t milli = market->milli[fitting];
            chance[fitting] = (double)milli - market->price[fitting] + worth[free - milli];
            best = fmax(best, chance[fitting]);
        }
        double total = LEFT_AS_IT_IS * exp(-best / CHOICE);
        for (int64_t size = 0; size < fitting; size++) {
            chance[size] = exp((chance[size] - best) / CHOICE) * market->coming[size];
            total += chance[size];
        }
        for (int64_t size = 0; size < fitting; size++)
            chance[size] = total > 0.0 ? chance[size] / total : 0.0;
        worth[free] = best;
    }
}

/* How many of each size the holes want, those included that are left over by the first to come. */
static void count_wanted(const shp_market *market) {
    double *flow = market->flow;
    memcpy(flow, market->holes, (size_t)(WHOLE_GPU + 1) * sizeof *flow);
    memset(market->wanted, 0, (size_t)market->sizes * sizeof *market->wanted);
    for (int64_t free = WHOLE_GPU - WHOLE_GPU % market->step; free > 0; free -= market->step) {
        const double *chance = market->chance + free * market->sizes;
        for (int64_t size = 0; flow[free] > 0.0 && size < market->sizes && market->milli[size] <= free; size++) {
            double comes = flow[free] * chance[size];
            market->wanted[size] += comes;
            flow[free - market->milli[size]] += comes;
        }
    }
}

static void move_prices(const shp_market *market, double speed) {
    for (int64_t size = 0; size < market->sizes; size++) {
        double too_many = log((market->wanted[size] + UNSURE) / (market->coming[size] + UNSURE));
        double price = market->price[size] + speed * too_many;
        market->price[size] = fmax(-(double)WHOLE_GPU, fmin(price, (double)market->milli[size]));
    }
}

void shp_settle_prices(const shp_market *market, int64_t rounds) {
    for (int64_t round = 0; round < rounds; round++) {
        fill_holes(market);
        count_wanted(market);
        move_prices(market, round < rounds / 2 ? FAST : FINE);
    }
    fill_holes(market);
    for (int64_t free = 0; free <= WHOLE_GPU; free++)
        market->worth[free] = market->worth[free - free % market->step];
}

void shp_fill_memory(int64_t kinds, const int64_t *takes, const double *gain, double *worth) {
    worth[0] = 0.0;
    for (int64_t free = 1; free <= WHOLE_GPU; free++) {
        worth[free] = worth[free - 1];
        for (int64_t kind = 0; kind < kinds; kind++)
            if (takes[kind] <= free)
                worth[free] = fmax(worth[free], gain[kind] + worth[free - takes[kind]]);
    }
}
