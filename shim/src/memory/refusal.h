/* Message on standard error about an allocation that the limit refused. Most programs report only that the GPU has no
 * memory left, although other tenants may still have some. */
#ifndef SHAREPOD_REFUSAL_H
#define SHAREPOD_REFUSAL_H

#include <stdint.h>

/* Write the message, at most once a minute: the requested bytes, the bytes in use, the limit, and the remedy. The
 * caller must not hold the lock of struct gpus. */
void refusal_say(int place, uint64_t bytes);

#endif
