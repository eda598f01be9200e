/* If an event cannot be recorded, the wait is removed at the next look, and the drain waits for the launches behind it.
 */
#include "time/waits.h"

#include "base/sys.h"
#include "driver/entries.h"
#include "driver/own_calls.h"

#define ROOM_PATIENCE (10 * SYS_MS) /* ns: as long as the launches of two metered windows take */
#define ROOM_POLL (100 * 1000ull)

/* Return whether the stream's row has too many events. `late`: do not wait for them again. */
static bool crowded(struct streams *streams, CUstream stream, bool late) {
    bool full = false;
    lock(&streams->lock);
    CUstreamCaptureMode mode = own_calls_begin();
    for (struct known_context *known = streams->contexts; known != NULL; known = known->next) {
        struct known_stream *row = known->ending ? NULL : streams_find(streams, known, stream);
        if (row == NULL || row->places < WAIT_PLACES || row->crowded || context_unsettled(known))
            continue;
        streams_oldest_wait(streams, row);
        full = row->places >= WAIT_PLACES;
        row->crowded = full && late;
    }
    own_calls_end(mode);
    unlock(&streams->lock);
    return full;
}

void waits_make_room(struct streams *streams, const struct gate *gate, CUstream stream) {
    uint64_t now = sys_now(), until = now + ROOM_PATIENCE;
    while (crowded(streams, stream, now >= until) && now < until && (atomic_load(&gate->word) & GATE_OPEN)) {
        sys_sleep(ROOM_POLL);
        now = sys_now();
    }
}

void waits_cancel(struct streams *streams, struct program_wait *wait) {
    lock(&streams->lock);
    wait->marked = true;
    unlock(&streams->lock);
}

void waits_fence(struct streams *streams, struct program_wait *wait, CUstream stream) {
    if (wait == NULL || !wait->fences)
        return;
    CUstreamCaptureMode mode = own_record_begin();
    bool recorded = wait->before != NULL && DRIVER(cuEventRecord)(wait->before, stream) == CUDA_SUCCESS;
    own_calls_end(mode);
    lock(&streams->lock);
    wait->fenced = recorded;
    wait->marked = !recorded;
    unlock(&streams->lock);
}

void waits_mark(struct streams *streams, struct queue *queue) {
    lock(&streams->lock);
    struct program_wait *wait = queue->mark;
    CUevent event = wait != NULL ? wait->behind : NULL;
    unlock(&streams->lock);
    if (event == NULL || !streams_call(queue))
        return;
    CUstreamCaptureMode mode = own_record_begin();
    DRIVER(cuEventRecord)(event, queue->stream);
    own_calls_end(mode);
    streams_called(queue);
    lock(&streams->lock);
    if (queue->mark == wait)
        wait->marked = true;
    queue->mark = NULL;
    unlock(&streams->lock);
}

bool waits_reached(const struct known_stream *row, const struct program_wait *wait) {
    if (wait->call != NULL && atomic_load(&wait->call->begun))
        return true;
    if (wait->fences)
        return wait->fenced && event_passed(wait->before, row->context->context);
    return !wait->unseen;
}

bool waits_block(struct streams *streams, struct queue *queue) {
    if (atomic_load(&queue->held_after) == NOT_HELD)
        return false;
    lock(&streams->lock);
    bool alive = !atomic_load(&queue->ended) && !context_unsettled(queue->row->context);
    CUstreamCaptureMode mode = own_calls_begin();
    bool blocks = alive && streams_oldest_wait(streams, queue->row) != NULL;
    own_calls_end(mode);
    unlock(&streams->lock);
    return blocks;
}

struct host_call *waits_keep_call(struct streams *streams, const struct host_call *call) {
    lock(&streams->lock);
    for (struct host_call *next, *old = atomic_exchange(&streams->returned, NULL); old != NULL; old = next) {
        next = old->next;
        slab_give(&streams->call_rows, old);
    }
    struct host_call *kept = slab_take(&streams->call_rows, sizeof *kept);
    unlock(&streams->lock);
    if (kept != NULL)
        *kept = *call;
    return kept;
}

/* Free the call later: a thread of the driver must not wait for the registry's lock. */
void waits_free_call(struct streams *streams, struct host_call *call) {
    call->next = atomic_load(&streams->returned);
    while (!atomic_compare_exchange_weak(&streams->returned, &call->next, call))
        ;
}

void waits_call_returned(struct streams *streams, struct host_call *call) {
    if (atomic_fetch_or(&call->over, CALL_RETURNED) & CALL_FORGOTTEN)
        waits_free_call(streams, call);
}
