/* Mapping of the shared pages. The size is checked first, because the descriptor may be any file. The hints page is
 * first mapped at a temporary address, where its magic number is checked. One system call then moves it to its final
 * address. So a thread that reads there finds either the earlier page or the new page. */
#include "session/pages.h"

#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/sys.h"

/* Map `bytes` bytes of a descriptor (-1: anonymous memory), at `place` unless it is NULL. Return the address; NULL: the
 * file is too short, or cannot be mapped. */
static void *map(void *place, size_t bytes, int protection, int descriptor) {
    int flags = (descriptor < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED) | (place != NULL ? MAP_FIXED : 0);
    if (descriptor >= 0 && sys_call(SYS_lseek, descriptor, 0, SEEK_END, 0, 0, 0) < (long)bytes)
        return NULL;
    long page = sys_call(SYS_mmap, (long)place, (long)bytes, protection, flags, descriptor, 0);
    if (page < 0 && page > -4096)
        return NULL;
    sys_call(SYS_madvise, page, (long)bytes, MADV_DONTFORK, 0, 0, 0); /* a child of fork maps its own page */
    return (void *)page;
}

const struct shp_hints *hints_reserve(void) {
    return map(NULL, sizeof(struct shp_hints), PROT_READ, -1);
}

void hints_clear(const struct shp_hints *place) {
    map((void *)place, sizeof *place, PROT_READ, -1);
}

void hints_map(const struct shp_hints *place, int descriptor) {
    struct shp_hints *hints = descriptor < 0 ? NULL : map(NULL, sizeof *hints, PROT_READ, descriptor);
    if (hints != NULL && hints->magic == SHP_MAGIC &&
        sys_call(SYS_mremap, (long)hints, sizeof *hints, sizeof *hints, MREMAP_MAYMOVE | MREMAP_FIXED, (long)place,
                 0) == (long)place)
        return;
    sys_unmap(hints, sizeof *hints);
    hints_clear(place);
}

struct shp_pulse *pulse_map(int descriptor) {
    return descriptor < 0 ? NULL : map(NULL, sizeof(struct shp_pulse), PROT_READ | PROT_WRITE, descriptor);
}

void pulse_unmap(struct shp_pulse *pulse) {
    sys_unmap(pulse, sizeof *pulse);
}
