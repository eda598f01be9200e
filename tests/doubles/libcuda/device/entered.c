/* What each call of the driver does first, see entries.c of generate.py: it is counted, and takes the driver's lock for
 * FAKE_CUDA_LOCK_NS, by default for no time. Threads that call at once wait for each other so long, as on a real
 * driver. The lock is held while nothing is waited for, and before what the call does.
 */
#include <sched.h>
#include <stdlib.h>

#include "device/fake.h"

static __thread unsigned long long calls;
static _Atomic unsigned long long next_ticket,
    served; /* the driver's lock: threads have it in the order in which they come */

/* Not CUDA: calls of the driver so far in this thread. */
EXPORT unsigned long long fake_driver_calls(void);
EXPORT unsigned long long fake_driver_calls(void) {
    return calls;
}

/* Return the value of the variable of the environment, read with the first call. */
static uint64_t lock_ns(void) {
    static _Atomic uint64_t known; /* and 1 */
    if (known == 0) {
        const char *text = getenv("FAKE_CUDA_LOCK_NS");
        known = (text != NULL ? strtoull(text, NULL, 10) : 0) + 1;
    }
    return known - 1;
}

void fake_entered(bool locks) {
    calls++;
    uint64_t length = locks ? lock_ns() : 0;
    if (length == 0)
        return;
    unsigned long long ticket = next_ticket++;
    while (served != ticket)
        sched_yield();
    for (uint64_t end = fake_now() + length; fake_now() < end;)
        ;
    served++;
}
