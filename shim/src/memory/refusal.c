/* The message has MiB: the limit is rounded down and all other sizes are rounded up, so that they never seem
 * to fit. */
#include "memory/refusal.h"

#include "base/sys.h"
#include "memory/state.h"

#define REFUSAL_EACH (60 * SYS_SECOND)

static uint64_t mib(uint64_t bytes) {
    return bytes / (1 << 20) + (bytes % (1 << 20) != 0);
}

void refusal_say(int place, uint64_t bytes) {
    struct memory *all = memory_state();
    char asked[SYS_DECIMAL], held[SYS_DECIMAL], allowed[SYS_DECIMAL];
    uint64_t now = sys_now(), due = atomic_load(&all->refusal_due);
    if (place < 0 || now < due || !atomic_compare_exchange_strong(&all->refusal_due, &due, now + REFUSAL_EACH))
        return;
    memory_lock();
    const struct gpu *gpu = &all->gpus->gpus[place];
    uint64_t used = gpu->used + gpu->siblings, limit = gpu->memory;
    memory_unlock();
    sys_say("an allocation of ", sys_decimal(mib(bytes), asked), " MiB of GPU memory was refused: this pod holds ",
            sys_decimal(mib(used), held), " MiB of its limit of ", sys_decimal(limit >> 20, allowed),
            " MiB; free memory, or request more of it for the pod", NULL);
}
