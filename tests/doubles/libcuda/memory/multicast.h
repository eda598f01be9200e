/* Multicast objects. With fake_lock. */
#ifndef FAKECUDA_MULTICAST_H
#define FAKECUDA_MULTICAST_H

#include "memory/virtual.h"

/* Called when physical memory or an object has no references and mappings: if it is a multicast object, unbind all its
 * memory. */
void fake_multicast_gone(const struct physical *object);

#endif
