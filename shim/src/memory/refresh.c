/* Calls the checks of physical memory, pools and credits, each of which finds memory that is free without a call of the
 * program. */
#include "memory/refresh.h"

#include "memory/credits.h"
#include "memory/physical.h"
#include "memory/pools/pool_memory.h"

bool memory_refresh(int place, bool driver) {
    bool less = physical_refresh();
    return (driver && pools_refresh(place)) || less;
}

uint64_t memory_step(uint64_t now, bool driver) {
    uint64_t pools = driver ? pools_step(now) : SYS_NEVER;
    uint64_t physical = physical_step(now), credits = credits_step(now);
    uint64_t first = pools < physical ? pools : physical;
    return first < credits ? first : credits;
}
