/* Memory that a context itself takes of its device. With fake_lock. */
#ifndef FAKECUDA_LIMITS_H
#define FAKECUDA_LIMITS_H

#include "device/fake.h"

enum { FAKE_PROCESSORS = 132, FAKE_THREADS_PER_PROCESSOR = 2048 };

/* Take the memory of a new context. Return false if the device has too little left. */
bool fake_context_charge(struct context *context);
void fake_context_release(struct context *context);
/* Drop all contexts, in a child of fork. */
void fake_contexts_forgotten(void);

#endif
