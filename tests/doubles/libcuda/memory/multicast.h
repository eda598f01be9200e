/* Multicast objects. With fake_lock. */
#ifndef FAKECUDA_MULTICAST_H
#define FAKECUDA_MULTICAST_H

#include "memory/virtual.h"

/* The object has neither references nor mappings any more: what was bound to it is let go. Nothing for other handles.
 */
void fake_multicast_gone(const struct physical *object);

#endif
