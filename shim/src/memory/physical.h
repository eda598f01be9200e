/* Physical memory (cuMemCreate) and multicast objects, and the counts of their references.
 *
 * Linear memory with an exported descriptor is physical memory too: its allocation counts as a mapping.
 *
 * Guarantees:
 * - Physical memory stays charged until its last reference ends: handles are released, mappings and bindings removed,
 *   exported descriptors closed, in any order.
 * - An object (multicast, or one behind a descriptor of several pieces) ends likewise, and then releases the memory
 *   bound to it.
 */
#ifndef SHAREPOD_PHYSICAL_H
#define SHAREPOD_PHYSICAL_H

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

#include "memory/allocations.h"

enum { MAPPING_STEP = 2 << 20 }; /* bytes: mappings begin and end at multiples of this, the driver's granularity */

/* Binding of physical memory to an object: `bytes` at the offset `at` of the object. */
struct binding {
    struct binding *next;
    struct physical *bound;
    uint64_t at, bytes;
};

/* Physical memory or an object. With the lock of struct gpus. */
struct physical {
    uint64_t bytes;           /* charged; 0: memory of another process, or an object */
    int place;                /* of its GPU in struct gpus; -1: nothing is charged */
    uint32_t handles;         /* references by handles */
    uint32_t mappings;        /* references by mappings and bindings */
    uint32_t pins;            /* calls under way that refer to it */
    uint32_t exports;         /* descriptors that were open when last counted (exports.h) */
    bool lingers;             /* it is in the list of memory to which only exported descriptors refer */
    int kept;                 /* copy of the descriptor that it was imported by; -1: none */
    struct binding *bindings; /* of an object */
    struct physical *next;    /* in that list */
};

/* Make physical memory, pinned, and the allocation of its handle, not in the table yet. NULL when the kernel gives no
 * memory. */
struct allocation *physical_begin(uint64_t bytes, int place);
/* Enter the handle if the driver made it, and unpin; otherwise free both. */
void physical_end(struct allocation *allocation, bool made, CUmemGenericAllocationHandle handle);
/* Return the physical memory of a handle; NULL: an unknown handle. With the lock. */
struct physical *physical_of(CUmemGenericAllocationHandle handle);
/* Return the memory mapped at an address, and how many bytes of the mapping lie from there on; NULL: unknown. With the
 * lock. */
struct physical *physical_at(uint64_t address, uint64_t *left);
/* Return the same, also of linear memory, which is physical memory from then on. NULL too if the kernel gives no
 * memory. With the lock. */
struct physical *physical_within(uint64_t address, uint64_t *left);
/* Make a pinned object to which one piece is bound; NULL when the kernel gives no memory. With the lock. */
struct physical *physical_object(struct physical *piece);
/* Add a binding to a list; it counts as a mapping. False: the kernel gives no memory. With the lock. */
bool physical_bind(struct binding **list, struct physical *bound, uint64_t at, uint64_t bytes);
/* Release the lock. Free `physical` first if nothing refers to it any more, and give its charge back after. May be
 * NULL. */
void physical_unlock(struct physical *physical);
/* Free lingering memory whose descriptors are all closed. True if bytes were returned. */
bool physical_refresh(void);
/* The same at regular times while anything lingers. Returns when to call again. Hook thread only. */
uint64_t physical_step(uint64_t now);
/* Free bindings that are out of their object's list. Without the lock. */
void physical_unbound(struct binding *bindings);

#endif
