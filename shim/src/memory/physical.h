/* Physical memory (cuMemCreate) and multicast objects, with counts of the references to each.
 *
 * Linear memory with an exported descriptor is physical memory too: its allocation counts as a mapping.
 *
 * Guarantees:
 * - Physical memory stays charged until its last reference has ended. References are handles, mappings, bindings and
 *   exported descriptors, and may end in any order.
 * - An object is a multicast object, or the memory behind one descriptor of an address range with several mappings. An
 *   object also ends with its last reference, and then releases the memory that is bound to it.
 */
#ifndef SHAREPOD_PHYSICAL_H
#define SHAREPOD_PHYSICAL_H

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

#include "memory/allocations.h"

enum { MAPPING_STEP = 2 << 20 }; /* bytes: granularity of the driver. Mappings begin and end at multiples of it */

/* Binding of `bytes` bytes of physical memory at the offset `at` of an object. */
struct binding {
    struct binding *next;
    struct physical *bound;
    uint64_t at, bytes;
};

/* Physical memory or an object. Guarded by the lock of struct gpus. */
struct physical {
    uint64_t bytes;           /* charged bytes; 0: memory of another process, or an object */
    int place;                /* place of its GPU in struct gpus; -1: nothing is charged */
    uint32_t handles;         /* number of handles */
    uint32_t mappings;        /* number of mappings and bindings */
    uint32_t pins;            /* number of wrapped calls under way that use it */
    uint32_t exports;         /* number of exported descriptors that were open at the last count (exports.h) */
    bool lingers;             /* only exported descriptors refer to it, and it is in the list `lingering` */
    int kept;                 /* kept copy of the descriptor from which it was imported; -1: none */
    struct binding *bindings; /* bindings of an object */
    struct physical *next;    /* next in the list `lingering` */
};

/* Begin to create physical memory: create its entry, with a pin, and the allocation of its handle. Return the
 * allocation, which is not in the table yet; NULL: host memory is exhausted. */
struct allocation *physical_begin(uint64_t bytes, int place);
/* Remove the pin. `made`: the driver has created the memory; add the handle to the table. Otherwise free the allocation
 * and the entry, and return the charge. */
void physical_end(struct allocation *allocation, bool made, CUmemGenericAllocationHandle handle);
/* Return the physical memory of a handle; NULL: the handle is unknown. The caller holds the lock. */
struct physical *physical_of(CUmemGenericAllocationHandle handle);
/* Return the physical memory that is mapped at an address; NULL: none. `*left`: bytes from the address to the end of
 * the mapping. The caller holds the lock. */
struct physical *physical_at(uint64_t address, uint64_t *left);
/* As physical_at, also for linear memory, which gets an entry (struct physical) by this call. Return NULL also if host
 * memory is exhausted. The caller holds the lock. */
struct physical *physical_within(uint64_t address, uint64_t *left);
/* Create an object with a pin, and bind the physical memory `piece` to it; NULL: host memory is exhausted. The caller
 * holds the lock. */
struct physical *physical_object(struct physical *piece);
/* Add a binding to a list. The binding counts as a mapping of `bound`. Return false if host memory is exhausted. The
 * caller holds the lock. */
bool physical_bind(struct binding **list, struct physical *bound, uint64_t at, uint64_t bytes);
/* Release the lock. If nothing refers to `physical` any more, free it before, and return its charge afterwards.
 * `physical` may be NULL. */
void physical_unlock(struct physical *physical);
/* Free lingering memory whose descriptors are all closed. Return whether any memory was freed. */
bool physical_refresh(void);
/* Call physical_refresh at regular times while any memory lingers. Return the time of the next call. Only the hook
 * thread calls this. */
uint64_t physical_step(uint64_t now);
/* Free bindings that were removed from their object's list. The caller must not hold the lock. */
void physical_unbound(struct binding *bindings);

#endif
