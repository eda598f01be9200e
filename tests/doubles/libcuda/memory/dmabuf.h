/* Descriptors of linear memory. */
#ifndef FAKECUDA_DMABUF_H
#define FAKECUDA_DMABUF_H

#include "memory/ranges.h"

/* Return whether an open descriptor keeps linear memory that the program is freeing. The memory is then freed when the
 * descriptor's last copy is closed. With fake_lock. */
bool fake_dmabuf_keeps(struct range *range);

#endif
