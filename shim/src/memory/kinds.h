/* Cache of the driver's answers whether an address is host memory or device memory. Without it, each copy call that
 * does not state the direction, such as cuMemcpy, would query the driver for both addresses.
 *
 * Guarantees:
 * - C12 An answer that an address is host memory is dropped before a wrapped call returns the address as device
 *   memory, and after KINDS_KEPT (1 s). So if a call that is not wrapped makes a host address a device address, the
 *   address counts as host memory for at most KINDS_KEPT. Such calls concern memory of other processes, graphics, or
 *   modules.
 * - No function takes a lock or calls the driver.
 *
 * All addresses of a page are of one kind, because mappings, registrations and reservations consist of whole pages.
 */
#ifndef SHAREPOD_KINDS_H
#define SHAREPOD_KINDS_H

#include <stdint.h>

/* KINDS_PLACES: entries, one per page; 64 MiB of contiguous memory fit. KINDS_REGIONS: marks, one per region of 2 MiB.
 * Regions that are 64 GiB apart share a mark. */
enum { KINDS_PLACES = 1 << 14, KINDS_REGIONS = 1 << 15 };

enum address_kind { ADDRESS_UNKNOWN, ADDRESS_HOST, ADDRESS_DEVICE };

/* The cache. All zero: empty. */
struct kinds {
    _Atomic uint64_t age;       /* number of times that all answers were dropped */
    _Atomic uint64_t forget_at; /* sys_now() at which all answers are dropped next */
    _Atomic uint64_t places[KINDS_PLACES];
    _Atomic uint64_t hosts[KINDS_REGIONS / 64]; /* marks of one bit: the driver has reported an address of the region as
                                                   host memory */
};

/* Return the present age. Call this before the driver is queried, and pass the age to kinds_find and kinds_note, so
 * that an answer from before a drop is not stored as new. */
uint64_t kinds_age(struct kinds *kinds);
/* Return the kind of an address; ADDRESS_UNKNOWN: there is no answer of this age. */
enum address_kind kinds_find(const struct kinds *kinds, uint64_t age, uint64_t address);
/* Store the driver's answer to a query that was made at this age. */
void kinds_note(struct kinds *kinds, uint64_t age, uint64_t address, enum address_kind kind);
/* Drop all answers, because a call has made some address a device address. */
void kinds_forget(struct kinds *kinds);
/* Drop all answers if one of these addresses, which are device memory now, is in a region that has had host addresses.
 */
void kinds_forget_host(struct kinds *kinds, uint64_t address, uint64_t bytes);

#endif
