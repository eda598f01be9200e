/* Moments inside driver calls at which a function of the test is called: in the thread of the call, without a lock. So
 * a test determines what happens at that moment, and need not wait for a coincidence. */
#include <string.h>

#include "device/fake.h"

static const char *const names[FAKE_MOMENTS] = {
    [MOMENT_LAUNCHED] = "launched", /* the kernel is on its stream */
    [MOMENT_ENDING] = "ending",     /* a call that may end a context has begun, and has changed nothing */
    [MOMENT_ENDED] = "ended",       /* such a call has finished its work, and is about to return */
};
static void (*_Atomic functions[FAKE_MOMENTS])(void);

/* Not a function of CUDA: call `function` at this moment of each such call; NULL: no longer. */
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
