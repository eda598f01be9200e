/* Memory that processes share. */
#ifndef FAKECUDA_SHARING_H
#define FAKECUDA_SHARING_H

#include "device/fake.h"

/* Make a descriptor whose receiver can read these bytes; -1 if no descriptor is left. */
int fake_describe_in_file(const void *content, size_t bytes);
/* Close the memory of other processes that a context has opened. With fake_lock. */
void fake_sharing_of_context_gone(struct context *context);

#endif
