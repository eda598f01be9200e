/* See meter.h.
 *
 * An event is recorded behind every window of launches, and the thread waits for the event before: at most two windows
 * are unfinished. A window grows to 64 launches while it takes less than 2 ms and shrinks to one launch while it takes
 * more than 5, so that the drain at the end of a quantum takes some milliseconds, or two kernels where these are
 * longer. Less would let the GPU run dry whenever the thread is late to wake up. Towards the end of the quantum the
 * fences come closer: what two windows hold shall be over soon after.
 *
 * The wait has bounds: a kernel may wait for what this very thread does next. It ends with the opening, after which
 * nothing passes the gate anyway, and after PATIENCE: then one launch may pass before the next wait, after another wait
 * in vain two, then four. A queue that was filled before it was metered stays as it is meanwhile.
 */
#include "meter.h"

#include "entries.h"
#include "process.h"
#include "streams.h"

enum { WINDOW_MOST = 64 };
#define PATIENCE (250 * SYS_MS)
#define TAIL SYS_MS /* of work beyond the quantum, behind which the next holder's can queue */
#define POLL_LEAST (20 * 1000ull)
#define POLL_MOST SYS_MS

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

/* A window has finished, and one is left unfinished, which is taken to be as long. */
static void adapt(struct slot *slot, struct slot_stream *entry, uint64_t now) {
    uint64_t took = now - entry->waited, window = entry->window, deadline = atomic_load(&the_process->gate.deadline);
    entry->waited = now;
    entry->ahead = least(entry->ahead, now + entry->last * window);
    entry->took = took;
    atomic_store_explicit(&slot->ends, now + took, memory_order_relaxed);
    if (took > 5 * SYS_MS && window > 1)
        entry->window /= 2;
    else if (took < 2 * SYS_MS && window < WINDOW_MOST)
        entry->window *= 2;
    if (deadline == SYS_NEVER)
        return;
    uint64_t until = deadline + TAIL, left = until > now + took ? until - now - took : 0, fits = left * window / (took + 1);
    if (fits < entry->window) /* the next fence comes sooner; what the window has learned stays */
        entry->count = (uint16_t)(entry->window - (fits > 0 ? fits : 1));
}

/* One more window is unfinished, behind those that are already; it is taken to be as long as the last one was. */
static void expect(struct slot *slot, uint64_t took) {
    uint64_t ends = atomic_load_explicit(&slot->ends, memory_order_relaxed), now = sys_now();
    if (took > 0)
        atomic_store_explicit(&slot->ends, (ends > now ? ends : now) + took, memory_order_relaxed);
}

/* Whether the work before the event has finished; not so if the wait reached one of its bounds. */
static bool wait_for(struct slot *slot, struct slot_stream *entry, CUevent event) {
    if (DRIVER(cuEventQuery)(event) != CUDA_ERROR_NOT_READY)
        return true;
    bool passed = false;
    atomic_store_explicit(&slot->fenced, true, memory_order_relaxed);
    uint64_t begun = sys_now(), waited = 0, ends = atomic_load_explicit(&slot->ends, memory_order_relaxed),
             due = ends > begun + entry->took ? ends - entry->took : begun; /* one window is behind it */
    do {
        if (waited > PATIENCE)
            entry->spare = entry->allowed = entry->allowed ? least(entry->allowed * 2ull, UINT16_MAX) : 1;
        if (waited > PATIENCE || !(atomic_load(&the_process->gate.word) & GATE_OPEN))
            break;
        uint64_t now = begun + waited, off = now > due ? now - due : due - now;
        sys_sleep(off / 8 < POLL_LEAST ? POLL_LEAST : least(off / 8, POLL_MOST));
        waited = sys_now() - begun;
        passed = DRIVER(cuEventQuery)(event) != CUDA_ERROR_NOT_READY;
    } while (!passed);
    atomic_store_explicit(&slot->fenced, false, memory_order_relaxed);
    return passed;
}

void meter_launched(struct slot *slot, struct slot_stream *entry) {
    if (entry->spare > 0) {
        entry->spare--;
        return;
    }
    if (++entry->count < entry->window)
        return;
    entry->count = 0;
    CUstreamCaptureMode mode = streams_hide();
    CUevent *event = &entry->events[entry->fences % FENCES];
    if (*event == NULL)
        *event = streams_make_event(entry->context, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC);
    if (*event != NULL && DRIVER(cuEventRecord)(*event, entry->stream) == CUDA_SUCCESS) {
        expect(slot, entry->took);
        if (entry->fences == 0) {
            entry->waited = sys_now();
            entry->fences = 1;
        } else {
            /* The other one is the older: wait for it, and the one recorded now takes its part. */
            CUevent newest = *event;
            if (wait_for(slot, entry, entry->events[0])) {
                entry->events[1] = entry->events[0];
                entry->events[0] = newest;
                entry->allowed = 0;
                adapt(slot, entry, sys_now());
            } else if (entry->allowed > 0) {
                entry->window = 1;
            }
        }
    }
    streams_unhide(mode);
}

uint64_t meter_expected_end(struct gate *gate) {
    uint32_t count = atomic_load(&gate->slot_count);
    uint64_t end = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t ends = atomic_load_explicit(&gate->slots[i].ends, memory_order_relaxed);
        end = ends > end ? ends : end;
    }
    return end;
}
