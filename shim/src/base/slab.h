/* A slab: small pieces of one size, from the kernel's memory. The hook has no heap of its own.
 *
 * Guarantees:
 * - a piece is zeroed when it is taken;
 * - memory is never returned to the kernel.
 * The caller holds one lock of its own during all calls.
 */
#ifndef SHAREPOD_SLAB_H
#define SHAREPOD_SLAB_H

#include <string.h>

#include "base/sys.h"

struct slab {
    void *spare; /* the free pieces: each begins with the address of the next */
};

enum { SLAB_BYTES = 64 << 10 }; /* taken from the kernel at once: some hundred pieces a system call */

/* Return a zeroed piece; NULL: the kernel gives no memory. `bytes` is the same in every call, and a multiple of 8. */
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

/* Take a piece back, for the next slab_take. */
static inline void slab_give(struct slab *slab, void *piece) {
    *(void **)piece = slab->spare;
    slab->spare = piece;
}

#endif
