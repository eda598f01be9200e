/* Which addresses are memory of the host and which of a device, as the driver has answered: a copy whose
 * call leaves that open would ask it for each address.
 *
 * Guarantees:
 * - C12 an answer is forgotten before a wrapped call returns an address of a device, and after KINDS_KEPT: an address
 *   that other calls have made one (of another process's memory, of graphics, of a module) counts as the host's for no
 *   longer, if it has been the host's before;
 * - no lock, no call of the driver.
 *
 * A page has one kind: mappings, registrations and reservations are of whole pages.
 */
#ifndef SHAREPOD_KINDS_H
#define SHAREPOD_KINDS_H

#include <stdint.h>

enum { KINDS_PLACES = 1 << 14 }; /* pages that are remembered: 64 MiB in one piece */

enum address_kind { ADDRESS_UNKNOWN, ADDRESS_HOST, ADDRESS_DEVICE };

/* Zeroed: nothing is known. */
struct kinds {
    _Atomic uint64_t age;       /* how often all was forgotten */
    _Atomic uint64_t forget_at; /* sys_now() at which all is forgotten next */
    _Atomic uint64_t places[KINDS_PLACES];
};

/* Return the present age, for the calls that follow, before the driver is asked. */
uint64_t kinds_age(struct kinds *kinds);
/* Return the kind of an address. */
enum address_kind kinds_find(const struct kinds *kinds, uint64_t age, uint64_t address);
/* Remember the driver's answer to a question that was asked at that age. */
void kinds_note(struct kinds *kinds, uint64_t age, uint64_t address, enum address_kind kind);
/* Forget all: a call has made an address of a device. */
void kinds_forget(struct kinds *kinds);

#endif
