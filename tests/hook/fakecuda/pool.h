/* Stream-ordered memory and its pools. With fake_lock. */
#ifndef FAKECUDA_POOL_H
#define FAKECUDA_POOL_H

#include "ranges.h"

/* The range goes back to its pool, now. */
void fake_pool_return(struct range *range);
/* The host has waited for all or some of the device's work: what is above their thresholds goes back to the device. */
void fake_pools_waited(int device);

#endif
