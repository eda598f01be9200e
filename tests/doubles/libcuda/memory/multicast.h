/* Multicast objects. With fake_lock. */
#ifndef FAKECUDA_MULTICAST_H
#define FAKECUDA_MULTICAST_H

#include "memory/virtual.h"

/* If a multicast object has no references and mappings, unbind all its memory. Other handles are unchanged. */
void fake_multicast_gone(const struct physical *object);

#endif
