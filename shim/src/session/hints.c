/* Mapping of the hints page. The size is checked before, the magic number after: the descriptor may be any file. */
#include "session/hints.h"

#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/sys.h"

const struct shp_hints *hints_map(int descriptor) {
    if (descriptor < 0 || sys_call(SYS_lseek, descriptor, 0, SEEK_END, 0, 0, 0) < (long)sizeof(struct shp_hints))
        return NULL;
    long page = sys_call(SYS_mmap, 0, sizeof(struct shp_hints), PROT_READ, MAP_SHARED, descriptor, 0);
    if (page < 0 && page > -4096)
        return NULL;
    sys_call(SYS_madvise, page, sizeof(struct shp_hints), MADV_DONTFORK, 0, 0, 0); /* a child maps its own */
    const struct shp_hints *hints = (const struct shp_hints *)page;
    if (hints->magic == SHP_MAGIC)
        return hints;
    hints_unmap(hints);
    return NULL;
}

void hints_unmap(const struct shp_hints *hints) {
    sys_unmap((void *)hints, sizeof *hints);
}
