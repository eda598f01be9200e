/* Linear memory that descriptors keep. */
#ifndef FAKECUDA_DMABUF_H
#define FAKECUDA_DMABUF_H

#include "memory/ranges.h"

/* Return whether a descriptor keeps the bytes of linear memory that is being freed. They are then freed with its last
 * copy. With fake_lock. */
bool fake_dmabuf_keeps(struct range *range);

#endif
