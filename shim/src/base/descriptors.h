/* The hook's own file descriptors among the program's.
 *
 * A program may close any descriptor, including the hook's: background services close all from 3 on. It may then open a
 * file of its own under the same number.
 *
 * Guarantees:
 * - A kept descriptor is used, and closed, only while its number still refers to the file that was kept.
 * - Kept numbers are chosen high, where programs seldom look, while any are free. So a program gets the numbers that it
 *   would get without the hook.
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

/* Keep the file that is open under `number`, perhaps under a higher number. False: the file cannot be identified, and
 * is closed. */
bool descriptor_keep(struct descriptor *descriptor, int number);
/* Return whether this process can open a quarter of its files still, and 32 at least, beyond one more of the hook's. */
bool descriptor_room(void);
/* Return a copy of a descriptor with a number above the usual limit of programs, or any number if none of these is
 * free; -1: there is no room. */
int descriptor_copy(int number);
/* Move a descriptor there, if there is room. Return its number; a negative one stays. */
int descriptor_move(int number);
/* Return the number if it still stands for the kept file, else -1. */
int descriptor_number(const struct descriptor *descriptor);
/* Close the file if the number still stands for it, and forget it. */
void descriptor_close(struct descriptor *descriptor);

#endif
