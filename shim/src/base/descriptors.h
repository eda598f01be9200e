/* The hook's own descriptors among the program's.
 *
 * A program may close any number, ours among them (background services close all from 3 on), and open a file of its own
 * under it. Guarantees: what is kept here is used only while the number still stands for the very file that it stood
 * for when it was kept, and closed only then. Numbers are taken from where programs seldom look, so that they get the
 * numbers that they would get without the hook.
 */
#ifndef SHAREPOD_DESCRIPTORS_H
#define SHAREPOD_DESCRIPTORS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* One writer. Any thread may ask whether it is ours and use it then; between the two the program could close it, for
 * which there is no cure. */
struct descriptor {
    _Atomic int number; /* -1: none */
    _Atomic uint64_t inode, device;
};

#define DESCRIPTOR_NONE {.number = -1}

/* Keeps the file that is open under `number`, perhaps under a higher one. False if it cannot be told from others: then
 * it is closed. */
bool descriptor_keep(struct descriptor *descriptor, int number);
/* The number, if it still stands for that file; else -1. */
int descriptor_number(const struct descriptor *descriptor);
/* Closes it, if it is still ours, and forgets it. */
void descriptor_close(struct descriptor *descriptor);

#endif
