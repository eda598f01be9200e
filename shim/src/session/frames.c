/* See frames.h. */
#include "session/frames.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "memory/credits.h"
#include "memory/pool_memory.h"
#include "process/process.h"

void frames_unmap_hints(struct session *session) {
    sys_unmap((void *)session->hints, sizeof *session->hints);
    session->hints = NULL;
}

static void map_hints(struct session *session, int descriptor) {
    frames_unmap_hints(session);
    if (descriptor < 0 || sys_call(SYS_lseek, descriptor, 0, SEEK_END, 0, 0, 0) < (long)sizeof(struct shp_hints))
        return;
    long page = sys_call(SYS_mmap, 0, sizeof(struct shp_hints), PROT_READ, MAP_SHARED, descriptor, 0);
    if (page < 0 && page > -4096)
        return;
    sys_call(SYS_madvise, page, sizeof(struct shp_hints), MADV_DONTFORK, 0, 0, 0); /* a child maps its own */
    session->hints = (const struct shp_hints *)page;
    if (session->hints->magic != SHP_MAGIC)
        frames_unmap_hints(session);
}

/* Tells the daemon what this process holds from an earlier connection. With the locks of gpus and session. */
static bool hand_over(struct gpus *gpus) {
    for (unsigned place = 0; place < gpus->count; place++) {
        struct gpu *gpu = &gpus->gpus[place];
        if (gpu->wire < 0 || gpu->credited == 0)
            continue;
        struct shp_reserve frame;
        memset(&frame, 0, sizeof frame);
        frame.header = (struct shp_header){.magic = SHP_MAGIC,
                                           .version = SHP_VERSION_MAX,
                                           .type = SHP_RESERVE,
                                           .size = sizeof frame,
                                           .seq = FRAMES_SEQ_HANDOVER};
        frame.gpu = (uint32_t)gpu->wire;
        frame.flags = SHP_RESERVE_HANDOVER;
        frame.bytes = gpu->credited;
        if (!session_put(&frame, sizeof frame))
            return false;
    }
    return true;
}

static bool valid_grant_of_gpus(const struct shp_welcome *frame) {
    if (frame->gpu_count < 1 || frame->gpu_count > SHP_MAX_GPUS)
        return false;
    for (unsigned i = 0; i < frame->gpu_count; i++)
        if (frame->gpus[i].request_milli > 1000 || frame->gpus[i].limit_milli > 1000)
            return false;
    return true;
}

static bool welcome(struct session *session, const struct shp_welcome *frame, int descriptor) {
    struct gpus *gpus = &the_process->gpus;
    if (session->state != SESSION_GREETING || !valid_grant_of_gpus(frame))
        return false;
    session->grace_ms = frame->grace_ms;
    session->gpu_count = frame->gpu_count;
    map_hints(session, descriptor);
    lock(&gpus->lock);
    gpus_learn(gpus, frame->gpus, frame->gpu_count, true);
    lock(&session->lock);
    bool done = hand_over(gpus);
    if (done) {
        session->state = SESSION_READY;
        atomic_store(&session->ready, 1);
    }
    unlock(&session->lock);
    unlock(&gpus->lock);
    sys_wake_all(&session->ready);
    if (done) {
        session->backoff = 20 * SYS_MS;
        session->shut = SESSION_OPEN;
        if (session->said != SAID_NOTHING)
            sys_say("connected to the agent", NULL);
        session->said = SAID_NOTHING;
        token_connected(&the_process->token);
    }
    return done;
}

static struct question *waiting_question(struct session *session, uint32_t seq) {
    for (int i = 0; i < SESSION_QUESTIONS; i++)
        if (session->questions[i].seq == seq && atomic_load(&session->questions[i].state) == 1)
            return &session->questions[i];
    return NULL; /* its thread has given up waiting */
}

static void answer(struct session *session, uint32_t seq, struct answer answer) {
    lock(&session->lock);
    struct question *question = waiting_question(session, seq);
    if (question != NULL) {
        question->answer = answer;
        atomic_store(&question->state, 2);
        sys_wake_all(&question->state);
    }
    unlock(&session->lock);
}

/* The GPU of a number on the wire. With the lock of gpus. */
static struct gpu *by_wire(struct gpus *gpus, uint32_t wire) {
    for (unsigned i = 0; i < gpus->count; i++)
        if (gpus->gpus[i].wire == (int)wire)
            return &gpus->gpus[i];
    return NULL;
}

static bool reserved(struct session *session, const struct shp_reserved *frame) {
    struct gpus *gpus = &the_process->gpus;
    if (frame->header.seq == FRAMES_SEQ_HANDOVER)
        return true; /* counted already */
    lock(&gpus->lock);
    struct gpu *gpu = by_wire(gpus, frame->gpu);
    if (gpu != NULL && frame->status == SHP_RESERVE_OK) {
        gpu->credited += frame->bytes; /* also when its thread has given up: then they are idle credits */
        gpu->tight = false;
    }
    unlock(&gpus->lock);
    answer(session, frame->header.seq, (struct answer){.came = true, .status = frame->status});
    return gpu != NULL;
}

static bool recall(struct session *session, const struct shp_recall *frame) {
    struct gpus *gpus = &the_process->gpus;
    lock(&gpus->lock);
    struct gpu *gpu = by_wire(gpus, frame->gpu);
    if (gpu != NULL) {
        int place = (int)(gpu - gpus->gpus);
        uint64_t given = credits_recall(place, frame->bytes);
        if (given < frame->bytes) { /* what pools have given back to the device may be counted still */
            unlock(&gpus->lock);
            bool less = growing_refresh(place);
            lock(&gpus->lock);
            given += less && gpu->wire >= 0 ? credits_recall(place, frame->bytes - given) : 0;
        }
        if (!session_release(session, place, given, SHP_RELEASE_RECALLED))
            gpu->credited += given; /* the daemon counts them still */
    }
    unlock(&gpus->lock);
    return gpu != NULL;
}

static bool limits_changed(const struct session *session, const struct shp_welcome *frame) {
    struct gpus *gpus = &the_process->gpus;
    if (session->state != SESSION_READY || !valid_grant_of_gpus(frame))
        return false;
    lock(&gpus->lock);
    gpus_learn(gpus, frame->gpus, frame->gpu_count, true);
    unlock(&gpus->lock);
    return true;
}

static bool refused(struct session *session, const struct shp_refused *frame) {
    char text[SHP_TEXT_BYTES + 1];
    memcpy(text, frame->text, SHP_TEXT_BYTES);
    text[SHP_TEXT_BYTES] = '\0';
    if (session->said != SAID_REFUSED)
        sys_say("the agent refuses this process: ", text, NULL);
    session->said = SAID_REFUSED;
    session->shut = frame->reason == SHP_REFUSED_RELEASING ? SESSION_RELEASING
                    : frame->reason == SHP_REFUSED_FULL    ? SESSION_FULL
                                                           : SESSION_OPEN;
    session->backoff = SYS_SECOND;
    return false;
}

bool frames_handle(struct session *session, const struct shp_header *header, size_t size, int descriptor) {
    struct token *token = &the_process->token;
    if (size < sizeof *header || header->magic != SHP_MAGIC || header->size != size)
        return false;
    if (session->state == SESSION_GREETING && header->type != SHP_WELCOME && header->type != SHP_REFUSED)
        return false;
#define AS(type) (size == sizeof(struct type))
    switch (header->type) {
    case SHP_WELCOME: return AS(shp_welcome) && welcome(session, (const struct shp_welcome *)header, descriptor);
    case SHP_LIMITS: return AS(shp_welcome) && limits_changed(session, (const struct shp_welcome *)header);
    case SHP_GRANT: return AS(shp_grant) && (token_granted(token, (const struct shp_grant *)header), true);
    case SHP_REVOKE:
        return AS(shp_revoke) && (token_revoked(token, ((const struct shp_revoke *)header)->grant_id), true);
    case SHP_RESERVED: return AS(shp_reserved) && reserved(session, (const struct shp_reserved *)header);
    case SHP_RECALL: return AS(shp_recall) && recall(session, (const struct shp_recall *)header);
    case SHP_MEMORY: {
        const struct shp_memory *frame = (const struct shp_memory *)header;
        if (AS(shp_memory))
            answer(session, header->seq, (struct answer){.came = true, .limit = frame->limit, .used = frame->used});
        return AS(shp_memory);
    }
    case SHP_REFUSED: return AS(shp_refused) && refused(session, (const struct shp_refused *)header);
    default: return true; /* of a later version: not for us */
    }
#undef AS
}
