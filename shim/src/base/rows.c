/* Growth of a table: the rows are copied into a mapping of twice the size. The first mapping has room for ROWS_FIRST
 * rows. */
#include "base/rows.h"

#include <string.h>

#include "base/sys.h"

enum { ROWS_FIRST = 64 }; /* rows: more than most programs have streams, and a few pages for the largest row */

bool rows_room(struct rows *rows, size_t size) {
    if (rows->count < rows->capacity)
        return true;
    unsigned capacity = rows->capacity ? rows->capacity * 2 : ROWS_FIRST;
    void *larger = sys_map(capacity * size);
    if (larger == NULL)
        return false;
    if (rows->rows != NULL)
        memcpy(larger, rows->rows, rows->count * size);
    sys_unmap(rows->rows, rows->capacity * size);
    rows->rows = larger;
    rows->capacity = capacity;
    return true;
}
