/* Handlers of the agent's frames about the connection and the shares.
 *
 * If a value is out of range, the frame violates the protocol: its handler returns false, and the session closes the
 * connection.
 */
#include "session/frames.h"

#include <string.h>

#include "session/pages.h"

static struct shp_header header_of(uint16_t version, uint16_t type, uint32_t size, uint32_t seq) {
    return (struct shp_header){.magic = SHP_MAGIC, .version = version, .type = type, .size = size, .seq = seq};
}

/* Report the memory of this process from an earlier connection to the agent (SE3, session.h), and then the end of the
 * report. Until that end, the agent uses its own earlier byte counts of the process. Any frame other than these reports
 * marks the end: the hook sends MEMINFO requests for all GPUs. Return false if the connection is lost. The caller
 * holds the locks of struct gpus and of the session. */
static bool hand_over(struct gpus *gpus, uint16_t version) {
    for (unsigned place = 0; place < gpus->count; place++) {
        struct gpu *gpu = &gpus->gpus[place];
        if (gpu->wire < 0 || gpu->credited == 0)
            continue;
        struct shp_reserve frame;
        memset(&frame, 0, sizeof frame);
        frame.header = header_of(version, SHP_RESERVE, sizeof frame, SESSION_SEQ_HANDOVER);
        frame.gpu = (uint32_t)gpu->wire;
        frame.flags = SHP_RESERVE_HANDOVER;
        frame.bytes = gpu->credited;
        if (!session_put(&frame, sizeof frame))
            return false;
    }
    for (unsigned place = 0; place < gpus->count; place++) {
        struct shp_meminfo all;
        memset(&all, 0, sizeof all);
        all.header = header_of(version, SHP_MEMINFO, sizeof all, SESSION_SEQ_PING);
        all.gpu = (uint32_t)gpus->gpus[place].wire;
        if (gpus->gpus[place].wire >= 0 && !session_put(&all, sizeof all))
            return false;
    }
    return true;
}

/* Return true if the number of GPUs and all shares of a WELCOME or LIMITS frame are in range. */
static bool valid_grant_of_gpus(const struct shp_welcome *frame) {
    if (frame->gpu_count < 1 || frame->gpu_count > SHP_MAX_GPUS)
        return false;
    for (unsigned i = 0; i < frame->gpu_count; i++)
        if (frame->gpus[i].request_milli > 1000 || frame->gpus[i].limit_milli > 1000)
            return false;
    return true;
}

/* Handler of WELCOME: store the shares, map the pages, and send the handover report. Then the connection is ready. */
static bool welcome(void *of, const void *packet, const int *descriptors) {
    struct session *session = of;
    const struct shp_welcome *frame = packet;
    struct gpus *gpus = session->gpus;
    if (session->state != SESSION_GREETING || frame->header.version < SHP_VERSION_MIN ||
        frame->header.version > SHP_VERSION_MAX || !valid_grant_of_gpus(frame))
        return false;
    session->grace_ms = frame->grace_ms;
    session->gpu_count = frame->gpu_count;
    session->version = frame->header.version;
    hints_map(session->hints, descriptors[SESSION_HINTS]);
    pulse_unmap(session->pulse);
    session->pulse = pulse_map(descriptors[SESSION_PULSE]);
    lock(&gpus->lock);
    gpus_learn(gpus, frame->gpus, frame->gpu_count, true);
    lock(&session->lock);
    bool done = hand_over(gpus, session->version);
    if (done) {
        session->state = SESSION_READY;
        atomic_store(&session->ready, 1);
        atomic_store(&session->greets, false);
    }
    unlock(&session->lock);
    unlock(&gpus->lock);
    sys_wake_all(&session->ready);
    if (done) {
        session->backoff = 20 * SYS_MS;
        session->admission = ADMITTED;
        if (session->logged != LOGGED_NOTHING)
            sys_say("connected to the agent", NULL);
        session->logged = LOGGED_NOTHING;
        if (session->listener.connected != NULL)
            session->listener.connected(session->listener.of);
    }
    return done;
}

/* Handler of RESERVED: add the granted bytes to the credits, and wake the thread that requested them. If it no longer
 * waits, the credits stay idle. */
static bool reserved(void *of, const void *packet, const int *descriptors) {
    struct session *session = of;
    const struct shp_reserved *frame = packet;
    struct gpus *gpus = session->gpus;
    (void)descriptors;
    if (frame->header.seq == SESSION_SEQ_HANDOVER)
        return true; /* answer to a handover report: these bytes are credits already */
    lock(&gpus->lock);
    struct gpu *gpu = gpus_by_wire(gpus, frame->gpu);
    if (gpu != NULL && frame->status == SHP_RESERVE_OK) {
        gpu->credited += frame->bytes;
        gpu->tight = false;
    }
    unlock(&gpus->lock);
    session_answer(session, frame->header.seq, (struct answer){.came = true, .status = frame->status});
    return gpu != NULL;
}

/* Handler of LIMITS: the tenant's shares have changed. */
static bool limits_changed(void *of, const void *packet, const int *descriptors) {
    const struct session *session = of;
    const struct shp_welcome *frame = packet;
    struct gpus *gpus = session->gpus;
    (void)descriptors;
    if (session->state != SESSION_READY || !valid_grant_of_gpus(frame))
        return false;
    lock(&gpus->lock);
    gpus_learn(gpus, frame->gpus, frame->gpu_count, true);
    unlock(&gpus->lock);
    return true;
}

/* Handler of MEMORY, which answers MEMINFO. A ping is a MEMINFO request that no thread waits for. In the answer to a
 * ping, the used bytes include all credits of this process, also idle ones. */
static bool memory(void *of, const void *packet, const int *descriptors) {
    struct session *session = of;
    const struct shp_memory *frame = packet;
    (void)descriptors;
    lock(&session->gpus->lock);
    struct gpu *gpu = gpus_by_wire(session->gpus, frame->gpu);
    if (gpu != NULL && frame->header.seq == SESSION_SEQ_PING)
        gpus_learn_siblings(gpu, frame->used, gpu->credited);
    unlock(&session->gpus->lock);
    session_answer(of, frame->header.seq, (struct answer){.came = true, .limit = frame->limit, .used = frame->used});
    return true;
}

/* Handler of REFUSED: the agent is about to close the connection. Write its reason, and wait longer before the next
 * attempt. */
static bool refused(void *of, const void *packet, const int *descriptors) {
    struct session *session = of;
    const struct shp_refused *frame = packet;
    (void)descriptors;
    char text[SHP_TEXT_BYTES + 1];
    memcpy(text, frame->text, SHP_TEXT_BYTES);
    text[SHP_TEXT_BYTES] = '\0';
    if (session->logged != LOGGED_REFUSED)
        sys_say("the agent refuses this process: ", text, NULL);
    session->logged = LOGGED_REFUSED;
    session->admission = frame->reason == SHP_REFUSED_RELEASING ? RELEASING
                         : frame->reason == SHP_REFUSED_FULL    ? TENANT_FULL
                                                                : ADMITTED;
    session->backoff = SYS_SECOND;
    return false;
}

void frames_register(struct session *session) {
    session_route(session, SHP_WELCOME, sizeof(struct shp_welcome), welcome, session);
    session_route(session, SHP_LIMITS, sizeof(struct shp_welcome), limits_changed, session);
    session_route(session, SHP_RESERVED, sizeof(struct shp_reserved), reserved, session);
    session_route(session, SHP_MEMORY, sizeof(struct shp_memory), memory, session);
    session_route(session, SHP_REFUSED, sizeof(struct shp_refused), refused, session);
}
