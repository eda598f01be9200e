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

/* A kept descriptor. Only one thread may write it. Any thread may get its number and use it. Between these two steps
 * the program could close the file; the hook cannot prevent that. */
struct descriptor {
    _Atomic int number; /* -1: none */
    _Atomic uint64_t inode, device;
};

#define DESCRIPTOR_NONE {.number = -1}

/* Keep the file that is open under `number`; the kept descriptor may get a higher number. Return false if the file
 * cannot be identified. The file is then closed. */
bool descriptor_keep(struct descriptor *descriptor, int number);
/* Return whether, after one more descriptor of the hook, this process can still open a quarter of its maximum of files,
 * and at least 32. */
bool descriptor_room(void);
/* Return a copy of a descriptor: with a number above the usual numbers of programs, or with another number from 3 on if
 * none of these is free. Return -1 if no number is free, or if the limit of open files is below 128. */
int descriptor_copy(int number);
/* Move a descriptor to a number as of descriptor_copy, if one is free. Return its number. A negative number is returned
 * unchanged. */
int descriptor_move(int number);
/* Return the number if it still refers to the kept file, else -1. */
int descriptor_number(const struct descriptor *descriptor);
/* Close the file if the number still refers to the kept file. Then clear the descriptor. */
void descriptor_close(struct descriptor *descriptor);

#endif
