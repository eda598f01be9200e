/* First step of each driver call, see entries.c of generate.py: the call is counted, and takes the driver's lock for
 * FAKE_CUDA_LOCK_NS, by default for no time. So threads that call at the same time wait for each other, as on a real
 * driver. The lock is released before the call does its work, so no thread waits for anything else while it holds the
 * lock. */
#include <sched.h>
#include <stdlib.h>

#include "device/fake.h"

static __thread unsigned long long calls;
static _Atomic unsigned long long next_ticket,
    served; /* the driver's lock, a ticket lock: threads get it in the order of their arrival */

/* Not a function of CUDA: returns the number of driver calls of this thread so far. */
EXPORT unsigned long long fake_driver_calls(void);
EXPORT unsigned long long fake_driver_calls(void) {
    return calls;
}

/* Return FAKE_CUDA_LOCK_NS of the environment, which is read at the first call. */
static uint64_t lock_ns(void) {
    static _Atomic uint64_t known; /* value plus 1; 0: not read yet */
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
