/* Memory freed without a call of the program: by the driver, from pools; by the kernel, when descriptors are closed. */
#ifndef SHAREPOD_REFRESH_H
#define SHAREPOD_REFRESH_H

#include <stdbool.h>
#include <stdint.h>

/* Count the bytes that were returned on a GPU (-1: on any). True if there were any. Without the lock. `driver`: it may
 * be asked. */
bool memory_refresh(int place, bool driver);
/* Do the same at regular times while it is of use, and give idle credits back. Returns when to call again. Hook thread
 * only. */
uint64_t memory_step(uint64_t now, bool driver);

#endif
