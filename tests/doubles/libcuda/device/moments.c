/* Moments inside calls of the driver, at which a test has a function of its own called: in the thread of the call, with
 * no lock held. So a test says what happens in between, where it would else have to wait for an accident. */
#include <string.h>

#include "device/fake.h"

static const char *const names[FAKE_MOMENTS] = {
    [MOMENT_LAUNCHED] = "launched", /* the kernel is on its stream */
    [MOMENT_ENDING] = "ending",     /* a call that may end a context has begun, and done nothing */
    [MOMENT_ENDED] = "ended",       /* it has done all, and is about to return */
};
static void (*_Atomic functions[FAKE_MOMENTS])(void);

/* Not CUDA: have the function called at that moment of each such call; NULL: no more. */
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
