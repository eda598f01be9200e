/* Stream-ordered memory and its pools. With fake_lock. */
#ifndef FAKECUDA_POOL_H
#define FAKECUDA_POOL_H

#include "ranges.h"

/* The range's bytes go back to its pool, now. The range itself stays the caller's. */
void fake_pool_return(struct range *range);
/* The host has waited for work of the device: what the pools hold above their thresholds goes back to it. */
void fake_pools_waited(int device);

#endif
