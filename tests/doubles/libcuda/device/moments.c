/* Hooks for tests: a test can register a function that is called at a certain moment inside driver calls, in the thread
 * of the call and without a lock. So a test can provoke a race instead of waiting for it. */
#include <string.h>

#include "device/fake.h"

static const char *const names[FAKE_MOMENTS] = {
    [MOMENT_LAUNCHED] = "launched", /* the kernel is on its stream */
    [MOMENT_ENDING] = "ending",     /* a call that may end a context has begun, and has changed nothing yet */
    [MOMENT_ENDED] = "ended",       /* a call that has ended a context is about to return */
};
static void (*_Atomic functions[FAKE_MOMENTS])(void);

/* Not a function of CUDA: from now on call `function` at the moment `name`. NULL: call none. */
EXPORT int fake_at(const char *name, void (*function)(void));
EXPORT int fake_at(const char *name, void (*function)(void)) {
    for (int i = 0; i < FAKE_MOMENTS; i++)
        if (strcmp(names[i], name) == 0) {
            functions[i] = function;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

void fake_moment(enum fake_moment moment) {
    void (*function)(void) = functions[moment];
    if (function != NULL)
        function();
}
