/* See meter.h.
 *
 * An event is recorded behind every window of launches, and the thread waits for the event before: at most two windows
 * are unfinished. A window grows to 64 launches while it takes less than 2 ms and shrinks to one launch while it takes
 * more than 5, so that the drain at the end of a quantum takes some milliseconds, or two kernels where these are
 * longer. Less would let the GPU run dry whenever the thread is late to wake up.
 *
 * The wait has bounds: a kernel may wait for what this very thread does next. It ends with the opening, after which
 * nothing passes the gate anyway, and after PATIENCE, from which on the stream is not metered in this opening.
 */
#include "meter.h"

#include "entries.h"
#include "process.h"
#include "streams.h"

enum { WINDOW_MOST = 64 };
#define PATIENCE (250 * SYS_MS)
#define POLL_LEAST (20 * 1000ull)
#define POLL_MOST SYS_MS

static void adapt(struct slot_stream *entry) {
    uint64_t now = sys_now(), took = now - entry->waited;
    if (took > 5 * SYS_MS && entry->window > 1)
        entry->window /= 2;
    else if (took < 2 * SYS_MS && entry->window < WINDOW_MOST)
        entry->window *= 2;
    entry->waited = now;
}

/* Whether the work before the event has finished; not so if the wait reached one of its bounds. */
static bool wait_for(struct slot_stream *entry, CUevent event) {
    uint64_t begun = sys_now();
    while (DRIVER(cuEventQuery)(event) == CUDA_ERROR_NOT_READY) {
        uint64_t waited = sys_now() - begun;
        if (waited > PATIENCE)
            entry->metered = false;
        if (waited > PATIENCE || !(atomic_load(&the_process->gate.word) & GATE_OPEN))
            return false;
        sys_sleep(waited / 8 < POLL_LEAST ? POLL_LEAST : waited / 8 > POLL_MOST ? POLL_MOST : waited / 8);
    }
    return true;
}

void meter_launched(struct slot_stream *entry) {
    if (++entry->count < entry->window)
        return;
    entry->count = 0;
    CUstream stream = entry->stream == NULL && entry->per_thread ? CU_STREAM_PER_THREAD : entry->stream;
    CUstreamCaptureMode mode = streams_hide();
    CUevent *event = &entry->events[entry->fences % FENCES];
    if (*event == NULL)
        *event = streams_make_event(entry->context);
    if (*event != NULL && DRIVER(cuEventRecord)(*event, stream) == CUDA_SUCCESS) {
        if (entry->fences == 0) {
            entry->waited = sys_now();
            entry->fences = 1;
        } else {
            /* The other one is the older: wait for it, and the one recorded now takes its part. */
            CUevent newest = *event;
            bool finished = wait_for(entry, entry->events[0]);
            entry->events[1] = entry->events[0];
            entry->events[0] = newest;
            if (finished)
                adapt(entry);
        }
    }
    streams_unhide(mode);
}
