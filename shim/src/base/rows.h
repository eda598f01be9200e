/* Growing table of rows, in memory of sys_map, so it is zeroed in a child of fork. During all calls the caller holds a
 * lock of its own, always the same one.
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

/* Make room for one more row. `size`: bytes of a row, the same in every call. Return false if host memory is exhausted.
 */
bool rows_room(struct rows *rows, size_t size);

#endif
