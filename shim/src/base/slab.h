/* Slab: small pieces of one size, in memory from the kernel, because the hook has no heap. During all calls the caller
 * holds a lock of its own, always the same.
 *
 * Guarantees:
 * - A piece is zeroed when it is taken.
 * - Memory is never returned to the kernel.
 */
#ifndef SHAREPOD_SLAB_H
#define SHAREPOD_SLAB_H

#include <string.h>

#include "base/sys.h"

struct slab {
    void *spare; /* first free piece; each free piece begins with the address of the next */
};

enum { SLAB_BYTES = 64 << 10 }; /* bytes requested from the kernel at once: several hundred pieces per system call */

/* Return a zeroed piece of `bytes` bytes; NULL: the kernel gives no memory. `bytes` is a multiple of 8, and the same in
 * every call. */
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

/* Return a piece to the slab. A later slab_take may return it again. */
static inline void slab_give(struct slab *slab, void *piece) {
    *(void **)piece = slab->spare;
    slab->spare = piece;
}

#endif
