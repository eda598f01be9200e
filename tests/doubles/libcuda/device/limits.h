/* What a context takes of its device by itself. With fake_lock. */
#ifndef FAKECUDA_LIMITS_H
#define FAKECUDA_LIMITS_H

#include "device/fake.h"

enum { FAKE_PROCESSORS = 132, FAKE_THREADS_PER_PROCESSOR = 2048 };

/* False when the device has not as much left. */
bool fake_context_charge(struct context *context);
void fake_context_release(struct context *context);
/* In the child of a fork, which has no contexts. */
void fake_contexts_forgotten(void);

#endif
