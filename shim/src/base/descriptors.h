/* The hook's own file descriptors among the program's.
 *
 * A program may close any descriptor, the hook's among them (background services close all from 3 on), and open a file
 * of its own under the same number. Guarantees:
 * - a kept descriptor is used, and closed, only while its number stands for the very file that was kept;
 * - kept numbers are taken from where programs seldom look, as long as there are free ones: a program gets the numbers
 *   that it would get without the hook.
 */
#ifndef SHAREPOD_DESCRIPTORS_H
#define SHAREPOD_DESCRIPTORS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* A kept descriptor. It has one writer. Any thread may ask for the number and use it; between the two the program could
 * close the file, for which there is no cure. */
struct descriptor {
    _Atomic int number; /* -1: none */
    _Atomic uint64_t inode, device;
};

#define DESCRIPTOR_NONE {.number = -1}

/* Keep the file that is open under `number`, perhaps under a higher number. False: the file cannot be told from others,
 * and is closed. */
bool descriptor_keep(struct descriptor *descriptor, int number);
/* Return whether this process can open a quarter of its files still, and 32 at least, beyond one more of the hook's. */
bool descriptor_room(void);
/* Return a copy of a descriptor with a number beyond what programs count up to, or any if none of these is free; -1:
 * there is no room. */
int descriptor_copy(int number);
/* Move a descriptor there, if there is room. Return its number; a negative one stays. */
int descriptor_move(int number);
/* Return the number if it still stands for the kept file, else -1. */
int descriptor_number(const struct descriptor *descriptor);
/* Close the file if the number still stands for it, and forget it. */
void descriptor_close(struct descriptor *descriptor);

#endif
