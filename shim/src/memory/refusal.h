/* The line on standard error about an allocation that the limit refused: most programs report no more than that the GPU
 * has no memory left, though others on it have plenty. */
#ifndef SHAREPOD_REFUSAL_H
#define SHAREPOD_REFUSAL_H

#include <stdint.h>

/* Write the line, once a minute at most: the bytes asked, held and allowed, and the remedy. Without the lock. */
void refusal_say(int place, uint64_t bytes);

#endif
