/* If the event of a wait cannot be recorded, the next check removes the wait's entry. The drain then also waits for the
 * launches behind that wait. */
#include "time/waits.h"

#include "base/sys.h"
#include "driver/entries.h"
#include "driver/own_calls.h"

#define ROOM_PATIENCE (10 * SYS_MS) /* ns: as long as the launches of two metered windows take */
#define ROOM_POLL (100 * 1000ull)

/* Add a wait to the row, and return its entry. Return NULL for a wait that is directly behind another one, or if the
 * row's waits have too many events in the stream: to a drain, such a wait is part of the launches behind it. The caller
 * holds the lock. */
static struct program_wait *note_wait(struct streams *streams, struct known_stream *row, struct host_call *call) {
    if (context_unsettled(row->context) || (call == NULL && row->unmarked != NULL))
        return NULL;
    bool full = row->places >= WAIT_PLACES;
    if (full) {
        streams_oldest_wait(streams, row);
        full = row->places >= WAIT_PLACES;
    }
    if (full && call == NULL)
        return NULL;
    struct program_wait *wait = row->context->spare;
    if (wait != NULL)
        row->context->spare = wait->next;
    else if ((wait = slab_take(&streams->wait_rows, sizeof *wait)) == NULL)
        return NULL;
    uint64_t launched = streams_launched(row);
    int self = sys_thread_id();
    bool fences = row->waits != NULL ? launched != row->launched_before
                                     : row->pending && (row->unmetered || !streams_covered(row));
    *wait = (struct program_wait){.call = call,
                                  .before = wait->before,
                                  .behind = wait->behind,
                                  .fences = fences && !full,
                                  .unseen = fences && full,
                                  .number = ++streams->noted,
                                  .launched = launched,
                                  .thread = self,
                                  .others = streams_launched_by_others(row, self)};
    fences &= !full;
    *(row->last_wait != NULL ? &row->last_wait->next : &row->waits) = wait;
    row->last_wait = wait;
    row->launched_before = launched;
    row->places += fences + (call == NULL);
    if (fences && wait->before == NULL)
        wait->before = event_make(row->context->context, CU_EVENT_DISABLE_TIMING);
    if (call != NULL)
        return wait;
    row->unmarked = wait;
    for (struct queue *queue = row->queues; queue != NULL; queue = queue->stream_next)
        atomic_store_explicit(&queue->word, 0, memory_order_relaxed); /* the next launch records `behind` before it */
    return wait;
}

/* Record a wait of the program in the row's stream. `row` may be NULL. The caller holds the lock. */
static void hold(struct known_stream *row) {
    if (row == NULL)
        return;
    row->held = true;
    for (struct queue *queue = row->queues; queue != NULL; queue = queue->stream_next) {
        uint64_t none = NOT_HELD, launched = atomic_load(&queue->launched);
        atomic_store(&queue->held_again, launched);
        atomic_compare_exchange_strong(&queue->held_after, &none, launched);
    }
}

/* Record a wait of the program in this stream of the context. For the legacy stream, record it in all streams of the
 * context, also later ones. `entry`: a stream that is no default stream gets an entry of the wait. Return as
 * waits_hold. The caller holds the lock. */
static struct program_wait *hold_in(struct streams *streams, struct known_context *known, CUstream stream,
                                    struct host_call *call, bool entry) {
    struct known_stream *named = stream_is_default(stream) ? NULL : streams_find(streams, known, stream);
    hold(named);
    hold(streams_find(streams, known, NULL));
    known->held |= stream == CU_STREAM_LEGACY;
    for (struct known_stream *row = known->streams; row != NULL && stream == CU_STREAM_LEGACY; row = row->next)
        hold(row);
    return named != NULL && entry ? note_wait(streams, named, call) : NULL;
}

void waits_held(struct streams *streams) {
    atomic_fetch_sub(&streams->holding, 1);
}

static struct program_wait *hold_stream(struct streams *streams, CUstream stream, CUcontext context,
                                        struct host_call *call, bool entry) {
    bool is_default = stream_is_default(stream), found = false;
    struct program_wait *wait = NULL;
    atomic_fetch_add(&streams->holding, 1);
    if (context == NULL && is_default && DRIVER(cuCtxGetCurrent)(&context) != CUDA_SUCCESS)
        return NULL;
    lock(&streams->lock);
    for (struct known_context *known = streams->contexts; known != NULL; known = known->next)
        if (!known->ending && (is_default ? known->context == context : streams_find(streams, known, stream) != NULL)) {
            wait = hold_in(streams, known, stream, call, entry);
            found = true;
        }
    unlock(&streams->lock);
    if (found || (context == NULL && (context = context_of_stream(stream)) == NULL))
        return wait;
    lock(&streams->lock);
    struct known_context *known = streams_current_ended(context) ? NULL : streams_note_context(streams, context);
    if (known != NULL && streams_note(streams, known, is_default ? NULL : stream) != NULL)
        wait = hold_in(streams, known, stream, call, entry);
    unlock(&streams->lock);
    return wait;
}

struct program_wait *waits_hold(struct streams *streams, CUstream stream, CUcontext context, struct host_call *call) {
    return hold_stream(streams, stream, context, call, true);
}

void waits_hold_launch(struct streams *streams, CUstream stream) {
    hold_stream(streams, stream, NULL, NULL, false);
}

/* Return whether a wait of the program is left in the row's stream. A wait behind which nothing was launched has no
 * event: the stream itself shows whether the wait is over. */
static bool row_waits(struct streams *streams, struct known_stream *row) {
    const struct program_wait *wait = streams_oldest_wait(streams, row);
    CUcontext popped;
    if (wait == NULL || wait->call != NULL || wait->marked || row->stream == STREAM_ORPHAN)
        return wait != NULL;
    if (DRIVER(cuCtxPushCurrent_v2)(row->context->context) != CUDA_SUCCESS)
        return true;
    bool idle = streams_idle(streams, row);
    DRIVER(cuCtxPopCurrent_v2)(&popped);
    if (idle && atomic_load(&streams->holding) == 0)
        streams_note_idle(streams, row);
    return !idle;
}

bool waits_left(struct streams *streams, const struct known_context *known, const struct known_stream *fence) {
    for (struct known_stream *row = known->streams; row != NULL; row = row->next)
        if (row != fence && row->waits != NULL && (fence == NULL || row->waits->number <= fence->number) &&
            row_waits(streams, row))
            return true;
    return false;
}

/* Return whether the stream's row has too many events. `late`: the thread has waited in vain, so mark the row as one
 * for which no thread waits again. */
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

bool waits_block(struct streams *streams, struct queue *queue, uint64_t *behind) {
    if (atomic_load(&queue->held_after) == NOT_HELD)
        return false;
    lock(&streams->lock);
    bool alive = !atomic_load(&queue->ended) && !context_unsettled(queue->row->context);
    CUstreamCaptureMode mode = own_calls_begin();
    const struct program_wait *wait = alive ? streams_oldest_wait(streams, queue->row) : NULL;
    if (wait != NULL && behind != NULL)
        *behind = streams_launched(queue->row) - wait->launched;
    own_calls_end(mode);
    unlock(&streams->lock);
    return wait != NULL;
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
    atomic_fetch_sub(&streams->functions, 1);
    if (atomic_fetch_or(&call->over, CALL_RETURNED) & CALL_FORGOTTEN)
        waits_free_call(streams, call);
}
