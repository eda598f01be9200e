/* Memory that is freed without a call of the program: the driver shrinks pools, and exported memory is free once its
 * descriptors are closed. */
#ifndef SHAREPOD_REFRESH_H
#define SHAREPOD_REFRESH_H

#include <stdbool.h>
#include <stdint.h>

/* Return the charges of memory that was freed on a GPU (-1: on all GPUs). Return whether there was any. `driver`: false
 * if no function of the driver may be called, because the program is exiting. The caller must not hold the lock of
 * struct gpus. */
bool memory_refresh(int place, bool driver);
/* Call memory_refresh at regular times while it can find anything, and return idle credits to the agent. Return the
 * time of the next call. Only the hook thread calls this. */
uint64_t memory_step(uint64_t now, bool driver);

#endif
