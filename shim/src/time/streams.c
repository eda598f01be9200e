/* Tables of the registry. Its lock is held during a few driver calls, none of which waits or calls the program back
 * (R4). wrappers/work/destroy.c has the wrappers of calls that end a stream or a context.
 *
 * Between registrations a thread uses its queue without the lock. When the stream ends, the queue is marked as ended.
 * The thread frees the queue at its next registration.
 */
#include "time/streams.h"

struct known_context *streams_find_context(struct streams *streams, CUcontext context) {
    struct known_context *known = context != NULL ? streams->contexts : NULL;
    while (known != NULL && (known->context != context || known->ending))
        known = known->next;
    return known;
}

/* Return the row of a context that is ending; NULL: no context with this handle is ending. */
static struct known_context *find_ending(struct streams *streams, CUcontext context) {
    struct known_context *known = streams->contexts;
    while (known != NULL && (known->context != context || !known->ending))
        known = known->next;
    return known;
}

bool streams_lives(struct streams *streams, CUcontext context, uint32_t epoch) {
    for (const struct known_context *known = streams->contexts; known != NULL; known = known->next)
        if (known->context == context && known->epoch == epoch)
            return !known->ending;
    return false;
}

struct known_context *streams_note_context(struct streams *streams, CUcontext context) {
    struct known_context *known = streams_find_context(streams, context);
    if (known != NULL || (known = slab_take(&streams->context_rows, sizeof *known)) == NULL)
        return known;
    *known = (struct known_context){.next = streams->contexts, .context = context, .epoch = ++streams->epochs};
    const struct known_context *other = find_ending(streams, context);
    known->amid = other != NULL ? other->ending : 0;
    return streams->contexts = known;
}

void streams_born(struct streams *streams, CUcontext context) {
    lock(&streams->lock);
    if (find_ending(streams, context) != NULL)
        streams_note_context(streams, context);
    unlock(&streams->lock);
}

static uint64_t hash_of_stream(const struct known_context *context, CUstream stream) {
    return hash_of((uintptr_t)context, (uintptr_t)stream);
}

struct known_stream *streams_find(struct streams *streams, const struct known_context *context, CUstream stream) {
    uint64_t hash = hash_of_stream(context, stream);
    for (struct hash_link *link = NULL; (link = hashed_next(&streams->streams, hash, link)) != NULL;) {
        struct known_stream *row = (struct known_stream *)link;
        if (row->context == context && row->stream == stream)
            return row;
    }
    return NULL;
}

struct known_stream *streams_add_row(struct streams *streams, struct known_context *context, CUstream stream) {
    struct known_stream *row = slab_take(&streams->stream_rows, sizeof *row);
    if (row == NULL)
        return NULL;
    *row = (struct known_stream){.context = context,
                                 .stream = stream,
                                 .held = context->held,
                                 .next = context->streams,
                                 .from = &context->streams};
    if (row->next != NULL)
        row->next->from = &row->next;
    context->orphans += stream == STREAM_ORPHAN;
    return context->streams = row;
}

struct known_stream *streams_note(struct streams *streams, struct known_context *context, CUstream stream) {
    struct known_stream *row = streams_find(streams, context, stream);
    if (row != NULL || !hashed_room(&streams->streams) || (row = streams_add_row(streams, context, stream)) == NULL)
        return row;
    hashed_add(&streams->streams, &row->link, hash_of_stream(context, stream));
    return row;
}

void streams_set_busy(struct streams *streams, struct known_stream *row, bool busy) {
    if (row->busy == busy)
        return;
    row->busy = busy;
    if (busy) {
        struct known_stream **list = row->stream == STREAM_ORPHAN ? &streams->orphans : &streams->busy;
        row->busy_from = list;
        row->busy_next = *list;
        *list = row;
    } else {
        *row->busy_from = row->busy_next;
    }
    if (row->busy_next != NULL)
        row->busy_next->busy_from = busy ? &row->busy_next : row->busy_from;
}

/* Remove the row's oldest wait. The caller holds the lock. */
static void give_wait(struct streams *streams, struct known_stream *row) {
    struct program_wait *wait = row->waits;
    for (struct queue *queue = row->queues; queue != NULL; queue = queue->stream_next)
        if (queue->mark == wait)
            queue->mark = NULL;
    row->waits = wait->next;
    row->crowded &= row->waits != NULL;
    if (row->waits == NULL)
        row->last_wait = NULL;
    if (row->unmarked == wait)
        row->unmarked = NULL;
    row->places -= wait->fences + (wait->call == NULL);
    if (wait->call != NULL && (atomic_fetch_or(&wait->call->over, CALL_FORGOTTEN) & CALL_RETURNED))
        slab_give(&streams->call_rows, wait->call);
    wait->next = row->context->spare;
    row->context->spare = wait;
}

uint64_t streams_launched(const struct known_stream *row) {
    uint64_t launched = 0;
    for (const struct queue *queue = row->queues; queue != NULL; queue = queue->stream_next)
        launched += atomic_load(&queue->launched);
    return launched;
}

uint64_t streams_launched_by_others(const struct known_stream *row, int thread) {
    uint64_t launched = 0;
    for (const struct queue *queue = row->queues; queue != NULL; queue = queue->stream_next)
        if (atomic_load(&queue->slot->thread) != thread)
            launched += atomic_load(&queue->launched);
    return launched;
}

/* A launch is counted after the driver's call. So a launch that was under way when `thread` was set changes the number
 * later. */
bool streams_crossed(const struct known_stream *row, const struct program_wait *wait) {
    return wait->crossed || streams_launched_by_others(row, wait->thread) != wait->others;
}

bool streams_covered(const struct known_stream *row) {
    for (const struct queue *queue = row->queues; queue != NULL; queue = queue->stream_next) {
        uint64_t launched = atomic_load(&queue->launched);
        if (atomic_load(&queue->fenced) != launched && queue->covered != launched)
            return false;
    }
    return true;
}

/* Note that no wait of the program is left in the row's stream. The caller holds the lock. */
static void unhold(const struct streams *streams, struct known_stream *row) {
    if (row->context->held || atomic_load(&streams->holding) > 0)
        return;
    row->held = row->blind = false;
    for (struct queue *queue = row->queues; queue != NULL; queue = queue->stream_next) {
        atomic_store(&queue->held_after, NOT_HELD);
        queue->held_long = false;
    }
}

/* Remove the row's oldest wait, which has passed. After the last wait, clear the queues' marks for waits of the
 * program. The caller holds the lock. */
static void drop_wait(struct streams *streams, struct known_stream *row) {
    give_wait(streams, row);
    if (row->waits == NULL)
        unhold(streams, row);
}

struct program_wait *streams_oldest_wait(struct streams *streams, struct known_stream *row) {
    for (struct program_wait *wait; (wait = row->waits) != NULL; drop_wait(streams, row)) {
        bool over = wait->call != NULL ? atomic_load(&wait->call->over) & CALL_RETURNED
                                       : wait->marked && event_passed(wait->behind, row->context->context);
        if (!over)
            return wait;
    }
    return NULL;
}

void streams_note_idle(struct streams *streams, struct known_stream *row) {
    while (row->waits != NULL)
        give_wait(streams, row);
    if (row->stream == NULL)
        row->context->held = false;
    else
        unhold(streams, row);
}

/* Remove a queue from the tables of the registry. The queue stays in a list of its slot. */
static void detach_queue(struct streams *streams, struct queue *queue) {
    if (queue->row == NULL)
        return;
    hashed_remove(&streams->queues, &queue->link);
    *queue->stream_from = queue->stream_next;
    if (queue->stream_next != NULL)
        queue->stream_next->stream_from = queue->stream_from;
    queue->row = NULL;
}

/* Move a queue from its list of the slot to the start of another list of the slot. */
static void move_queue(struct queue *queue, struct queue **list) {
    if (queue->slot_from != NULL)
        *queue->slot_from = queue->slot_next;
    if (queue->slot_from != NULL && queue->slot_next != NULL)
        queue->slot_next->slot_from = queue->slot_from;
    queue->slot_from = list;
    queue->slot_next = *list;
    if (queue->slot_next != NULL)
        queue->slot_next->slot_from = &queue->slot_next;
    *list = queue;
}

void streams_depart(struct known_context *known, bool departs) {
    for (struct known_stream *row = known->streams; row != NULL; row = row->next)
        for (struct queue *queue = row->queues; queue != NULL; queue = queue->stream_next) {
            atomic_store_explicit(&queue->word, 0, memory_order_relaxed);
            atomic_store(&queue->departs, departs);
        }
}

bool streams_in_call(const struct known_context *known) {
    for (const struct known_stream *row = known->streams; row != NULL; row = row->next) {
        if (row->covering)
            return true;
        for (const struct queue *queue = row->queues; queue != NULL; queue = queue->stream_next)
            if (atomic_load(&queue->calls))
                return true;
    }
    return false;
}

void streams_forget(struct streams *streams, struct known_stream *row, bool events) {
    while (row->queues != NULL) {
        struct queue *queue = row->queues;
        atomic_store(&queue->ended, true);
        atomic_store_explicit(&queue->word, 0, memory_order_relaxed);
        detach_queue(streams, queue);
        move_queue(queue, &queue->slot->ended);
    }
    while (row->waits != NULL)
        give_wait(streams, row);
    if (events && row->event != NULL)
        DRIVER(cuEventDestroy_v2)(row->event);
    streams_set_busy(streams, row, false);
    if (row->stream == STREAM_ORPHAN)
        row->context->orphans--;
    else
        hashed_remove(&streams->streams, &row->link);
    *row->from = row->next;
    if (row->next != NULL)
        row->next->from = row->from;
    slab_give(&streams->stream_rows, row);
}

void streams_forget_context(struct streams *streams, struct known_context *known) {
    while (known->streams != NULL)
        streams_forget(streams, known->streams, false);
    for (struct program_wait *next, *wait = known->spare; wait != NULL; wait = next) { /* their events have ended */
        next = wait->next;
        slab_give(&streams->wait_rows, wait);
    }
    struct known_context **at = &streams->contexts;
    while (*at != known)
        at = &(*at)->next;
    *at = known->next;
    slab_give(&streams->context_rows, known);
}

/* Return whether a capture is open, or may begin, that an event in the row's stream would join or break (R3). For the
 * legacy stream: whether a stream that it waits for captures. The legacy stream itself cannot capture. */
static bool may_capture(const struct streams *streams, const struct known_stream *row) {
    for (unsigned i = 0; i < streams->captures.count; i++) {
        const struct open_capture *capture = streams_capture(streams, i);
        bool same = row->stream != NULL ? capture->stream == row->stream : capture->blocks;
        if (same && capture->context == row->context->context)
            return true;
    }
    return false;
}

/* Return whether a call with this stream of the row disturbs no capture (R3). While a stream captures that the legacy
 * stream waits for, a call with the legacy stream would disturb the capture. */
static bool may_touch(const struct streams *streams, const struct known_stream *row, CUstream stream) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (streams->captures.count == 0)
        return true;
    return !may_capture(streams, row) &&
           (!HAS(cuStreamIsCapturing) ||
            (DRIVER(cuStreamIsCapturing)(stream, &status) == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_NONE));
}

bool streams_record(const struct streams *streams, const struct known_stream *row, CUevent event) {
    CUstream stream = row->stream ? row->stream : CU_STREAM_LEGACY;
    CUcontext context = row->context->context, popped;
    if (streams->captures.count == 0)
        return event_record(context, event, stream) == CUDA_SUCCESS;
    if (DRIVER(cuCtxPushCurrent_v2)(context) != CUDA_SUCCESS)
        return false;
    bool recorded = may_touch(streams, row, stream) && DRIVER(cuEventRecord)(event, stream) == CUDA_SUCCESS;
    DRIVER(cuCtxPopCurrent_v2)(&popped);
    return recorded;
}

bool streams_may_record(const struct streams *streams, const struct known_stream *row) {
    return may_touch(streams, row, row->stream);
}

bool streams_blocking(struct known_stream *row) {
    unsigned flags = CU_STREAM_DEFAULT;
    if (row->stream == NULL || !HAS(cuStreamGetFlags))
        return true;
    if (row->flags == FLAGS_UNKNOWN)
        row->flags = DRIVER(cuStreamGetFlags)(row->stream, &flags) == CUDA_SUCCESS && (flags & CU_STREAM_NON_BLOCKING)
                         ? FLAGS_NON_BLOCKING
                         : FLAGS_BLOCKING;
    return row->flags == FLAGS_BLOCKING;
}

CUresult streams_query(const struct streams *streams, const struct known_stream *row, CUstream stream) {
    if (!may_touch(streams, row, stream))
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    CUresult result = DRIVER(cuStreamQuery)(stream);
    return result == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED ? CUDA_ERROR_NOT_READY
                                                           : result; /* the query met another capture */
}

bool streams_idle(const struct streams *streams, const struct known_stream *row) {
    return streams_query(streams, row, row->stream) == CUDA_SUCCESS;
}

bool streams_records_context(const struct streams *streams) {
    return HAS(cuCtxRecordEvent) && streams->captures.count == 0;
}

bool streams_may_block(const struct streams *streams, const struct known_stream *row) {
    return row->held && !streams_records_context(streams);
}

bool streams_record_context(const struct streams *streams, const struct known_stream *row, CUevent event) {
    return streams_records_context(streams) && DRIVER(cuCtxRecordEvent)(row->context->context, event) == CUDA_SUCCESS;
}

void streams_retained(struct streams *streams, CUdevice device, CUcontext context) {
    if (device < 0 || device >= STREAMS_DEVICES)
        return;
    unsigned long long number = context_number(context);
    lock(&streams->primaries_lock);
    streams->primaries[device].context = context;
    streams->primaries[device].number = number;
    streams->primaries[device].retained++;
    unlock(&streams->primaries_lock);
}

/* Destroy events of the context with this epoch, unless it has ended, and set them to NULL. The caller holds the
 * lock. */
static void destroy_events(struct streams *streams, CUcontext context, uint32_t epoch, CUevent *events, int count) {
    bool lives = streams_lives(streams, context, epoch);
    for (int i = 0; i < count; i++) {
        if (events[i] != NULL && lives)
            DRIVER(cuEventDestroy_v2)(events[i]);
        events[i] = NULL;
    }
}

void streams_destroy_events(struct streams *streams, CUcontext context, uint32_t epoch, CUevent *events, int count) {
    lock(&streams->lock);
    destroy_events(streams, context, epoch, events, count);
    unlock(&streams->lock);
}

uint32_t streams_epoch(struct streams *streams, CUcontext context) {
    lock(&streams->lock);
    const struct known_context *known =
        context == NULL || find_ending(streams, context) != NULL ? NULL : streams_note_context(streams, context);
    uint32_t epoch = known != NULL ? known->epoch : 0;
    unlock(&streams->lock);
    return epoch;
}

bool streams_event_over(struct streams *streams, CUcontext context, uint32_t epoch, CUevent event) {
    bool over = true;
    lock(&streams->lock);
    for (const struct known_context *known = streams->contexts; known != NULL; known = known->next)
        if (known->context == context && known->epoch == epoch)
            over = !context_unsettled(known) && event_passed(event, context);
    if (over)
        destroy_events(streams, context, epoch, &event, 1);
    unlock(&streams->lock);
    return over;
}

/* Free the slot's queues whose streams have ended. Only the slot's thread calls this, or another thread after its exit.
 * The caller holds the lock. */
static void reap(struct streams *streams, struct slot *slot) {
    while (slot->ended != NULL) {
        struct queue *queue = slot->ended;
        slot->ended = queue->slot_next;
        remembered_remove(&slot->remembered, remembered_key(queue->stream, NULL), queue);
        if (stream_is_default(queue->stream)) /* the key may contain the context or not */
            remembered_remove(&slot->remembered, remembered_key(queue->stream, queue->context), queue);
        for (int i = 0; i < SLOT_RECENT; i++)
            if (slot->recent[i] == queue)
                slot->recent[i] = NULL;
        destroy_events(streams, queue->context, queue->epoch, queue->events, PACE_FENCES);
        destroy_events(streams, queue->context, queue->epoch, &queue->tail, 1);
        slab_give(&streams->queue_rows, queue);
    }
}

void streams_abandon(struct streams *streams, struct slot *slot) {
    lock(&streams->lock);
    while (slot->queues != NULL) {
        struct queue *queue = slot->queues;
        struct known_stream *row = queue->row;
        if (atomic_load(&queue->launched) > 0) /* the row's event replaces the fences of this queue */
            row->unmetered |= row->pending;
        row->skipped |= queue->awaited;
        detach_queue(streams, queue);
        move_queue(queue, &slot->ended);
    }
    reap(streams, slot);
    unlock(&streams->lock);
}

static uint64_t hash_of_queue(const struct slot *slot, const struct known_stream *row, CUstream stream) {
    return hash_of(hash_of((uintptr_t)slot, (uintptr_t)row), (uintptr_t)stream);
}

/* Return the queue of the slot's thread on the stream with this name; NULL: there is none. The caller holds the
 * lock. */
static struct queue *find_queue(struct streams *streams, const struct slot *slot, const struct known_stream *row,
                                CUstream stream) {
    struct queue *only = row->queues; /* usually only one thread launches into a stream */
    if (only != NULL && only->slot == slot && only->stream == stream)
        return only;
    uint64_t hash = hash_of_queue(slot, row, stream);
    for (struct hash_link *link = NULL; (link = hashed_next(&streams->queues, hash, link)) != NULL;) {
        struct queue *queue = (struct queue *)link;
        if (queue->slot == slot && queue->row == row && queue->stream == stream)
            return queue;
    }
    return NULL;
}

struct queue *streams_queue(struct streams *streams, const struct slot *slot, CUstream stream, CUcontext context) {
    struct queue *queue = NULL;
    lock(&streams->lock);
    for (const struct known_context *known = streams->contexts; known != NULL && queue == NULL; known = known->next) {
        if (known->ending || (context != NULL && known->context != context))
            continue;
        struct known_stream *row = streams_find(streams, known, stream_is_default(stream) ? NULL : stream);
        queue = row != NULL ? find_queue(streams, slot, row, stream) : NULL;
    }
    unlock(&streams->lock);
    return queue;
}

/* Return this queue, created if necessary; NULL: no memory. */
static struct queue *note_queue(struct streams *streams, struct slot *slot, struct known_stream *row, CUstream stream) {
    struct queue *queue = find_queue(streams, slot, row, stream);
    if (queue != NULL)
        return queue;
    if (!hashed_room(&streams->queues) || (queue = slab_take(&streams->queue_rows, sizeof *queue)) == NULL)
        return NULL;
    queue->slot = slot;
    queue->row = row;
    queue->stream = stream;
    queue->context = row->context->context;
    queue->epoch = row->context->epoch;
    atomic_store(&queue->held_after, row->held ? 0 : NOT_HELD);
    queue->stream_next = row->queues;
    queue->stream_from = &row->queues;
    if (queue->stream_next != NULL)
        queue->stream_next->stream_from = &queue->stream_next;
    row->queues = queue;
    move_queue(queue, &slot->queues);
    hashed_add(&streams->queues, &queue->link, hash_of_queue(slot, row, stream));
    return queue;
}

bool streams_current_ended(CUcontext context) {
    CUcontext current = NULL;
    CUdevice device;
    if (DRIVER(cuCtxGetCurrent)(&current) != CUDA_SUCCESS || current != context)
        return false;
    CUresult result = DRIVER(cuCtxGetDevice)(&device);
    return result == CUDA_ERROR_CONTEXT_IS_DESTROYED || result == CUDA_ERROR_INVALID_CONTEXT;
}

/* Return the key of a stream, as gate_key of fastpath.h does. */
static uint64_t key_of(const struct gate *gate, CUstream stream, CUcontext context) {
    bool by_context = stream_is_default(stream) && atomic_load(&gate->contexts) != CONTEXTS_ONE;
    return remembered_key(stream, by_context ? context : NULL);
}

/* Return the queue that is stored in the slot's table; NULL: there is none for this stream and context. */
static struct queue *recall(const struct slot *slot, uint64_t key, CUstream stream, CUcontext context) {
    struct queue *queue = slot != NULL ? remembered_find(&slot->remembered, key) : NULL;
    return queue != NULL && queue->stream == stream && queue->context == context ? queue : NULL;
}

/* Make the queue's thread record the event behind the last wait of the row, before it launches. The caller holds the
 * lock. */
static void choose_mark(struct known_stream *row, struct queue *queue) {
    struct program_wait *wait = row->unmarked;
    if (wait->behind == NULL)
        wait->behind = event_make(row->context->context, CU_EVENT_DISABLE_TIMING);
    queue->mark = wait->behind != NULL ? wait : NULL;
    wait->marked = wait->behind == NULL;
    row->unmarked = NULL;
    if (streams_launched(row) == row->launched_before) {
        wait->thread = atomic_load(&queue->slot->thread);
        wait->others = streams_launched_by_others(row, wait->thread);
    }
}

bool streams_register(struct streams *streams, struct gate *gate, struct slot *slot, CUstream stream, uint32_t word,
                      struct queue **queue) {
    CUcontext context = context_of_stream(stream);
    *queue = NULL;
    if (context == NULL) /* the driver will refuse the launch */
        return true;
    uint64_t key = key_of(gate, stream, context);
    *queue = recall(slot, key, stream, context);
    if (*queue != NULL && atomic_load_explicit(&(*queue)->word, memory_order_relaxed) == word)
        return true;
    lock(&streams->lock);
    if (slot != NULL && slot->ended != NULL)
        reap(streams, slot);
    *queue = recall(slot, key, stream, context);
    struct known_stream *row = *queue != NULL && !(*queue)->row->context->ending ? (*queue)->row : NULL;
    if (row == NULL) {
        struct known_context *known = streams_find_context(streams, context);
        if (known == NULL && (known = find_ending(streams, context)) == NULL) {
            if (streams_current_ended(context)) {
                unlock(&streams->lock);
                return true;
            }
            known = streams_note_context(streams, context);
        }
        row = known != NULL ? streams_note(streams, known, stream_is_default(stream) ? NULL : stream) : NULL;
        bool meters = row != NULL && slot != NULL && !context_unsettled(known);
        *queue = meters ? note_queue(streams, slot, row, stream) : NULL;
        if (*queue != NULL)
            remembered_add(&slot->remembered, key_of(gate, stream, context), *queue);
    }
    bool metered = slot != NULL && (word & GATE_METERED) != 0;
    bool noted = row != NULL && (!metered || *queue != NULL || context_unsettled(row->context));
    if (noted) {
        row->pending = true;
        row->unmetered |= *queue == NULL;
        streams_set_busy(streams, row, true);
    }
    if (streams->epochs > 1)
        atomic_store(&gate->contexts, CONTEXTS_SEVERAL);
    if (*queue != NULL && row->unmarked != NULL && !context_unsettled(row->context))
        choose_mark(row, *queue);
    if (*queue != NULL) /* 0 while a capture is open: each launch then checks whether a capture records it */
        atomic_store_explicit(&(*queue)->word, word & GATE_CAPTURING ? 0 : word, memory_order_relaxed);
    unlock(&streams->lock);
    return noted;
}
