/* Growing table of rows, in memory from the kernel that is zeroed in a child of fork. During all calls the caller holds
 * a lock of its own, always the same.
 *
 * Guarantees:
 * - A row keeps its index permanently.
 * - A row moves in memory when the table grows, so a pointer to a row is valid only until the next rows_room().
 */
#ifndef SHAREPOD_ROWS_H
#define SHAREPOD_ROWS_H

#include <stdbool.h>
#include <stddef.h>

struct rows {
    void *rows;
    unsigned count, capacity; /* number of rows used so far; number of rows that fit */
};

/* Make room for one more row of `size` bytes, which is the same in every call. Return false if the kernel gives no
 * memory. */
bool rows_room(struct rows *rows, size_t size);

#endif
