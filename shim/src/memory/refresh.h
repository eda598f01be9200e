/* Memory that is freed without a call of the program: from pools by the driver, and by the kernel when exported
 * descriptors are closed. */
#ifndef SHAREPOD_REFRESH_H
#define SHAREPOD_REFRESH_H

#include <stdbool.h>
#include <stdint.h>

/* Return the charges of memory that was freed on a GPU (-1: on all GPUs). Return whether there was any. `driver`: the
 * driver may be called. Without the lock. */
bool memory_refresh(int place, bool driver);
/* Call memory_refresh at regular times while it can find anything, and return idle credits to the agent. Return the
 * time of the next call. Only the hook thread calls this. */
uint64_t memory_step(uint64_t now, bool driver);

#endif
