/* List of freed memory, each entry with an event behind its free. The list's lock is held while the driver is queried
 * about the events, because such a query neither blocks nor calls the hook. The lock is taken before the lock of struct
 * streams. */
#include "process/freed.h"

#include "driver/entries.h"
#include "driver/own_calls.h"
#include "session/session.h"

#define LOOK (100 * SYS_MS) /* ns between two regular checks of the events: sibling processes may need the memory */

struct freed {
    struct freed *next;
    struct allocation *allocation;
    CUcontext context; /* context of the event */
    uint32_t epoch;    /* epoch of that context */
    CUevent event;
};

/* Record an event behind the work of the stream. Return false if the driver refuses. */
static bool record(struct freed *piece, CUstream stream) {
    if (piece->context == NULL || (piece->event = event_make(piece->context, CU_EVENT_DISABLE_TIMING)) == NULL)
        return false;
    return event_record(piece->context, piece->event, stream) == CUDA_SUCCESS;
}

void freed_add(struct freed_memory *freed, struct streams *streams, struct allocation *allocation, CUstream stream) {
    struct freed piece = {.allocation = allocation, .context = context_of_stream(stream)};
    CUstreamCaptureMode mode = own_record_begin();
    piece.epoch = streams_epoch(streams, piece.context);
    bool recorded = piece.epoch != 0 && record(&piece, stream);
    own_calls_end(mode);
    mode = own_calls_begin();
    lock(&freed->lock);
    struct freed *kept = recorded ? slab_take(&freed->slab, sizeof *kept) : NULL;
    if (kept != NULL) {
        piece.next = freed->first;
        *kept = piece;
        freed->first = kept;
    }
    unlock(&freed->lock);
    if (kept == NULL) {
        streams_destroy_events(streams, piece.context, piece.epoch, &piece.event, 1);
        uncharge_end(allocation, true);
    }
    own_calls_end(mode);
    if (kept != NULL)
        session_wake(); /* the hook thread checks it */
}

bool freed_refresh(struct freed_memory *freed, struct streams *streams) {
    bool less = false;
    if (freed->first == NULL)
        return false;
    CUstreamCaptureMode mode = own_calls_begin();
    lock(&freed->lock);
    struct freed *left = NULL;
    for (struct freed *next, *piece = freed->first; piece != NULL; piece = next) {
        next = piece->next;
        if (!streams_event_over(streams, piece->context, piece->epoch, piece->event)) {
            piece->next = left;
            left = piece;
            continue;
        }
        uncharge_end(piece->allocation, true);
        slab_give(&freed->slab, piece);
        less = true;
    }
    freed->first = left;
    unlock(&freed->lock);
    own_calls_end(mode);
    return less;
}

bool freed_await(struct freed_memory *freed, struct streams *streams) {
    bool less = freed_refresh(freed, streams);
    for (uint64_t now = sys_now(), until = now + SYS_SECOND; freed->first != NULL && now < until; now = sys_now()) {
        sys_sleep(SYS_MS / 4);
        less |= freed_refresh(freed, streams);
    }
    return less;
}

uint64_t freed_step(struct freed_memory *freed, struct streams *streams, uint64_t now) {
    if (freed->first == NULL) {
        freed->next_look = 0;
        return SYS_NEVER;
    }
    if (freed->next_look != 0 && now < freed->next_look)
        return freed->next_look;
    if (freed->next_look != 0)
        freed_refresh(freed, streams);
    return freed->next_look = now + LOOK;
}
