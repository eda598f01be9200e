/* Multicast objects. With fake_lock. */
#ifndef FAKECUDA_MULTICAST_H
#define FAKECUDA_MULTICAST_H

#include "memory/virtual.h"

/* Unbind everything from a multicast object without references and mappings. Does nothing for other handles. */
void fake_multicast_gone(const struct physical *object);

#endif
