/* Slab: allocator of small blocks of one size. The hook must not use the program's heap, so the memory comes from
 * sys_map. During all calls the caller holds a lock of its own, always the same one.
 *
 * Guarantees:
 * - An allocated block is zeroed.
 * - A slab never returns memory to the operating system.
 */
#ifndef SHAREPOD_SLAB_H
#define SHAREPOD_SLAB_H

#include <string.h>

#include "base/sys.h"

struct slab {
    void *spare; /* first free block; each free block begins with the address of the next */
};

enum { SLAB_BYTES = 64 << 10 }; /* bytes of one mapping: several hundred blocks per system call */

/* Allocate a zeroed block of `bytes` bytes; NULL: host memory is exhausted. `bytes` is a multiple of 8, and the same in
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

/* Free a block. A later slab_take may return it again. */
static inline void slab_give(struct slab *slab, void *piece) {
    *(void **)piece = slab->spare;
    slab->spare = piece;
}

#endif
