/* Bytes are written in MiB: the limit rounded down, all others up, so that the figures never seem to fit. */
#include "memory/refusal.h"

#include "base/sys.h"
#include "memory/state.h"

#define REFUSAL_EACH (60 * SYS_SECOND)

enum { DIGITS = 20 };

/* Write a number, with its final zero, at the end of `text`. Return where it begins. */
static const char *decimal(uint64_t number, char text[DIGITS + 1]) {
    char *at = text + DIGITS;
    *at = '\0';
    do {
        *--at = (char)('0' + number % 10);
        number /= 10;
    } while (number > 0);
    return at;
}

static uint64_t mib(uint64_t bytes) {
    return bytes / (1 << 20) + (bytes % (1 << 20) != 0);
}

void refusal_say(int place, uint64_t bytes) {
    struct memory *all = memory_state();
    char asked[DIGITS + 1], held[DIGITS + 1], allowed[DIGITS + 1];
    uint64_t now = sys_now(), due = atomic_load(&all->refusal_due);
    if (place < 0 || now < due || !atomic_compare_exchange_strong(&all->refusal_due, &due, now + REFUSAL_EACH))
        return;
    memory_lock();
    const struct gpu *gpu = &all->gpus->gpus[place];
    uint64_t used = gpu->used + gpu->siblings, limit = gpu->memory;
    memory_unlock();
    sys_say("an allocation of ", decimal(mib(bytes), asked), " MiB of GPU memory was refused: this pod holds ",
            decimal(mib(used), held), " MiB of its limit of ", decimal(limit >> 20, allowed),
            " MiB; free memory, or request more of it for the pod", NULL);
}
