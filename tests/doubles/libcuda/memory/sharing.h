/* Memory that processes share. */
#ifndef FAKECUDA_SHARING_H
#define FAKECUDA_SHARING_H

#include "device/fake.h"

/* A descriptor that says these bytes to whoever gets it; -1 if there is none to be had. */
int fake_describe_in_file(const void *content, size_t bytes);
/* What the context has opened of others ends with it. With fake_lock. */
void fake_sharing_of_context_gone(struct context *context);

#endif
