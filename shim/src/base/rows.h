/* A table of rows that grows: memory from the kernel, zeroed in a child of fork. All calls with one lock of the
 * caller's.
 *
 * Guarantees:
 * - a row keeps its index for good;
 * - a row moves in memory when the table grows: no pointer to a row outlives rows_room().
 */
#ifndef SHAREPOD_ROWS_H
#define SHAREPOD_ROWS_H

#include <stdbool.h>
#include <stddef.h>

struct rows {
    void *rows;
    unsigned count, capacity; /* rows ever used; rows there is room for */
};

/* Makes room for one more row of `size` bytes, the same in every call. False: the kernel gives no memory. */
bool rows_room(struct rows *rows, size_t size);

#endif
