/* Small pieces of one size each, from the kernel: the hook has no heap of its own. All calls with one lock of the
 * caller's.
 */
#ifndef SHAREPOD_SLAB_H
#define SHAREPOD_SLAB_H

#include <string.h>

#include "base/sys.h"

struct slab {
    void *spare; /* each begins with the address of the next */
};

enum { SLAB_BYTES = 64 << 10 };

/* A zeroed piece; NULL when the kernel gives no memory. `bytes` is the same in every call, and a multiple of 8. */
static inline void *slab_take(struct slab *slab, size_t bytes) {
    if (slab->spare == NULL) {
        char *fresh = sys_map(SLAB_BYTES);
        for (size_t at = 0; fresh != NULL && at + bytes <= SLAB_BYTES; at += bytes) {
            *(void **)(fresh + at) = slab->spare;
            slab->spare = fresh + at;
        }
    }
    void *piece = slab->spare;
    if (piece != NULL) {
        slab->spare = *(void **)piece;
        memset(piece, 0, bytes);
    }
    return piece;
}

static inline void slab_give(struct slab *slab, void *piece) {
    *(void **)piece = slab->spare;
    slab->spare = piece;
}

#endif
