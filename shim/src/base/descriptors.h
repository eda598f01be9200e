/* The hook's own file descriptors, in a process whose program may close any descriptor.
 *
 * Background services, for example, close all descriptors from 3 on, including the hook's. The program may then open a
 * file of its own under the same number.
 *
 * Guarantees:
 * - A kept descriptor is used, and closed, only while its number still refers to the file that was kept.
 * - While high numbers are free, kept descriptors have high numbers. So a program gets the same numbers for its files
 *   as without the hook.
 */
#ifndef SHAREPOD_DESCRIPTORS_H
#define SHAREPOD_DESCRIPTORS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* A kept descriptor. Only one thread may write it. Any thread may get its number and then use that number. In between,
 * the program could close the file; the hook cannot prevent that. */
struct descriptor {
    _Atomic int number; /* -1: none */
    _Atomic uint64_t inode, device;
};

#define DESCRIPTOR_NONE {.number = -1}

/* Keep the file that is open under `number`; the kept descriptor may get a higher number. Return false if the file
 * cannot be identified. The file is then closed. */
bool descriptor_keep(struct descriptor *descriptor, int number);
/* Return true if the hook may open one more descriptor: afterwards the program can still open a quarter of its limit of
 * open files, and at least 32 files. */
bool descriptor_room(void);
/* Return a copy of a descriptor: with a number above the usual numbers of programs, or with another number from 3 on if
 * none of these is free. Return -1 if no number is free, or if the limit of open files is below 128. */
int descriptor_copy(int number);
/* Move a descriptor to a high number, chosen as by descriptor_copy. Return its number: the old one if none is free. A
 * negative number is returned unchanged. */
int descriptor_move(int number);
/* Return the number if it still refers to the kept file, else -1. */
int descriptor_number(const struct descriptor *descriptor);
/* Close the file if the number still refers to the kept file. Then clear the descriptor. */
void descriptor_close(struct descriptor *descriptor);

#endif
