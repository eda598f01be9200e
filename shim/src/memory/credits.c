/* Credits of each GPU: `used` of `credited` bytes are in use. The lock of struct gpus guards both.
 *
 * A reservation first takes idle credits, then requests more from the agent, and then tries again, because another
 * thread may have taken the new credits.
 *
 * The number of idle credits adapts to the program. If the program allocates bytes again soon after they were returned
 * to the agent, the process keeps as many idle from then on (`kept`). So a loop that allocates and frees the same bytes
 * sends only one request to the agent. Credits that were idle for a whole CREDITS_LOOK_NS are returned.
 */
#include "memory/credits.h"

#include "memory/state.h"

/* ms for which an allocation waits for an absent agent. A restart of the agent takes seconds. */
#ifndef SHAREPOD_MEMORY_WAIT_MS
#define SHAREPOD_MEMORY_WAIT_MS 30000
#endif

/* Bytes: credits are requested in multiples of this, so that small allocations seldom send a request. It is the
 * granularity of physical memory. */
#define CREDIT_STEP (2ull << 20)
/* Bytes: idle credits beyond the sum of this and `kept` are returned at once. It is the step by which the driver grows
 * a pool. */
#define CREDITS_IDLE_MOST (32ull << 20)
/* Limit of the bytes that are requested from the agent: 64 TiB. No GPU has as many. */
#define RESERVE_MOST (1ull << 46)
/* ns for which to wait for the agent's answer if the known limit already forbids the bytes. An answer takes 22 us, from
 * a busy agent some ms. */
#define RULED_OUT (100 * SYS_MS)
/* Time between two checks of idle credits. A check returns the credits that were idle since the check before. So idle
 * credits are returned within a second of their last use. */
#define CREDITS_LOOK_NS (500 * SYS_MS)
/* If bytes are allocated again within this time after their return, they were returned too soon. */
#define CREDITS_SOON_NS SYS_SECOND

static struct gpu *gpu_at(int place) {
    return &memory_state()->gpus->gpus[place];
}

/* Make the hook thread check this GPU. The caller holds the lock. */
static void watch(struct gpu *gpu) {
    if (gpu->watched)
        return;
    gpu->watched = true;
    gpu->idle_least = 0;
    gpu->idle_look = 0;
    session_wake();
}

/* Update the minimum of idle credits after a change of `credited` or `used`. If any are idle, make the hook thread
 * check them. The caller holds the lock. */
static void moved(struct gpu *gpu) {
    uint64_t idle = gpu->credited - gpu->used;
    if (idle < gpu->idle_least)
        gpu->idle_least = idle;
    if (idle > 0)
        watch(gpu);
}

/* The process must request `bytes` bytes from the agent. If it has returned as many only a short time ago, keep as many
 * idle in future. The caller holds the lock. */
static void missed(struct gpu *gpu, uint64_t bytes) {
    if (gpu->parted == 0)
        return;
    if (sys_now() > gpu->parted_last + CREDITS_SOON_NS)
        gpu->parted = 0;
    uint64_t again = bytes < gpu->parted ? bytes : gpu->parted;
    gpu->parted -= again;
    gpu->kept += again;
}

/* Take bytes from the idle credits. Return false if they are too few. The caller holds the lock. */
static bool take(struct gpu *gpu, uint64_t bytes) {
    if (gpu->credited - gpu->used < bytes)
        return false;
    gpu->used += bytes;
    moved(gpu);
    return true;
}

bool credits_take(int place, uint64_t bytes) {
    struct gpus *gpus = memory_state()->gpus;
    lock(&gpus->lock);
    bool taken = take(gpu_at(place), bytes);
    unlock(&gpus->lock);
    return taken;
}

/* Why the idle credits do not suffice for a reservation. */
struct shortage {
    uint64_t missing; /* bytes */
    bool hopeless;    /* a request to the agent is useless: the GPU's limit can never allow the bytes */
    bool over;        /* with the missing bytes, this process alone would exceed the known limit */
};

/* Reserve bytes from the idle credits. If they are too few, return false and fill `shortage`. */
static bool try_take(int place, uint64_t bytes, struct shortage *shortage) {
    struct gpus *gpus = memory_state()->gpus;
    struct gpu *gpu = gpu_at(place);
    lock(&gpus->lock);
    bool taken = take(gpu, bytes);
    uint64_t missing = taken ? 0 : bytes - (gpu->credited - gpu->used);
    missed(gpu, missing);
    /* A limit that is not enforced refuses nothing. If the agent is absent, the bytes are reported when it is back. */
    if (!taken && !gpu->enforced && gpu->wire < 0 && bytes <= RESERVE_MOST) {
        gpu->credited += missing;
        taken = take(gpu, bytes);
    }
    shortage->missing = missing;
    shortage->hopeless = bytes > RESERVE_MOST || (gpu->enforced && bytes > gpu->memory);
    shortage->over = gpu->enforced && gpu->used + bytes > gpu->memory;
    unlock(&gpus->lock);
    return taken;
}

/* Steps, until the bytes are reserved or the agent has refused step 4:
 * 1. Take idle credits.
 * 2. Request credits in whole steps; the agent grants them only if it has them at once.
 * 3. Once: return the charges of memory that pools have returned to the device, and of exports that are closed. Then
 *    start again at step 1, also if another thread has returned such charges since the request.
 * 4. Request exactly the missing bytes: the agent recalls idle credits of sibling processes for them.
 *
 * If the agent does not answer, and the known limit already excludes the bytes, they count as refused.
 */
bool credits_reserve(int place, uint64_t bytes) {
    uint64_t deadline = 0;
    struct shortage shortage;
    bool exact = false, refreshed = false;
    for (;;) {
        if (try_take(place, bytes, &shortage))
            return true;
        uint64_t now = sys_now(), missing = shortage.missing, more = memory_rounded(missing, CREDIT_STEP);
        if (deadline == 0)
            deadline = now + SHAREPOD_MEMORY_WAIT_MS * SYS_MS;
        if (shortage.hopeless || now >= deadline)
            return false;
        exact = exact || more == missing;
        uint64_t patience = shortage.over && deadline - now > RULED_OUT ? RULED_OUT : deadline - now;
        uint32_t given_back = atomic_load(&memory_state()->given_back);
        struct answer answer = session_ask(memory_state()->session, SHP_RESERVE, exact ? 0 : SHP_RESERVE_AHEAD, place,
                                           exact ? missing : more, patience);
        /* RESERVED has added the credits. Try again, because another thread may take them first. */
        if (answer.came ? answer.status == SHP_RESERVE_OK : !shortage.over)
            continue;
        bool less = !refreshed && memory_state()->refresh(place, true);
        if (!refreshed && (less || atomic_load(&memory_state()->given_back) != given_back)) {
            refreshed = true;
            continue;
        }
        if (exact || !answer.came) /* last attempt: another thread may have freed memory since */
            return credits_take(place, bytes);
        exact = true;
    }
}

bool credits_reserve_ahead(int place, uint64_t bytes) {
    struct shortage shortage;
    for (;;) {
        if (try_take(place, bytes, &shortage))
            return true;
        if (shortage.hopeless || shortage.over || !atomic_load(&memory_state()->session->ready))
            return false;
        struct answer answer =
            session_ask(memory_state()->session, SHP_RESERVE, SHP_RESERVE_AHEAD, place, shortage.missing, SYS_SECOND);
        if (!answer.came || answer.status != SHP_RESERVE_OK)
            return false;
    }
}

/* Send the reports that could not be sent earlier, because the socket was full: growth, and the ends of recalls. Return
 * false if one still cannot be sent. The caller holds the lock. */
static bool reports_sent(int place, struct gpu *gpu) {
    struct session *session = memory_state()->session;
    if (gpu->unreported > 0 && session_grown(session, place, gpu->unreported))
        gpu->unreported = 0;
    while (gpu->unreported == 0 && gpu->unanswered > 0 && session_release(session, place, 0, SHP_RELEASE_RECALLED))
        gpu->unanswered--;
    return gpu->unreported == 0 && gpu->unanswered == 0;
}

/* Return idle credits to the agent. The caller holds the lock. */
static void give_back(int place, uint64_t idle) {
    struct gpu *gpu = gpu_at(place);
    gpu->credited -= idle;
    if (!reports_sent(place, gpu) || !session_release(memory_state()->session, place, idle, 0))
        gpu->credited += gpu->wire < 0 ? 0 : idle; /* not sent: the process keeps the credits while it is connected */
}

void credits_return(int place, uint64_t bytes) {
    struct gpus *gpus = memory_state()->gpus;
    if (place < 0 || bytes == 0)
        return;
    struct gpu *gpu = gpu_at(place);
    lock(&gpus->lock);
    gpu->used -= bytes;
    uint64_t idle = gpu->credited - gpu->used;
    if (idle > 0 && gpu->tight) {
        give_back(place, idle);
    } else if (idle > CREDITS_IDLE_MOST + gpu->kept) {
        gpu->parted += idle - gpu->kept;
        gpu->parted_last = sys_now();
        give_back(place, idle - gpu->kept);
    }
    moved(gpu);
    unlock(&gpus->lock);
}

void credits_grow(int place, uint64_t bytes) {
    struct gpus *gpus = memory_state()->gpus;
    if (place < 0 || bytes == 0)
        return;
    struct gpu *gpu = gpu_at(place);
    lock(&gpus->lock);
    uint64_t idle = gpu->credited - gpu->used, more = bytes > idle ? bytes - idle : 0;
    gpu->used += bytes;
    gpu->credited += more;
    if (gpu->wire >= 0) { /* without a connection nothing is reported: the next one begins with a report of all bytes */
        gpu->unreported += more;
        if (!reports_sent(place, gpu))
            watch(gpu);
    }
    moved(gpu);
    unlock(&gpus->lock);
}

/* From now on, keep no more idle credits than CREDITS_IDLE_MOST. The caller holds the lock. */
static void keep_little(struct gpu *gpu) {
    gpu->kept = gpu->parted = 0;
}

/* Remove up to `bytes` idle credits, and return their number. The caller holds the lock. */
static uint64_t take_idle(struct gpu *gpu, uint64_t bytes) {
    uint64_t idle = gpu->credited - gpu->used, given = idle < bytes ? idle : bytes;
    gpu->credited -= given;
    moved(gpu);
    return given;
}

/* Handler of RECALL: return idle credits up to the requested number. The agent waits for the RELEASE with the flag
 * RECALLED. If it cannot be sent now, the hook thread sends it later. */
static bool recalled(void *of, const void *packet, const int *descriptors) {
    struct memory *memory = of;
    const struct shp_recall *frame = packet;
    struct gpus *gpus = memory->gpus;
    (void)descriptors;
    lock(&gpus->lock);
    struct gpu *gpu = gpus_by_wire(gpus, frame->gpu);
    if (gpu != NULL) {
        int place = (int)(gpu - gpus->gpus);
        keep_little(gpu); /* a sibling process needs the credits */
        uint64_t given = take_idle(gpu, frame->bytes);
        if (given < frame->bytes) { /* memory that pools have returned to the device may still be counted */
            unlock(&gpus->lock);
            bool less = memory->refresh(place, false);
            lock(&gpus->lock);
            given += less && gpu->wire >= 0 ? take_idle(gpu, frame->bytes - given) : 0;
        }
        if (!reports_sent(place, gpu) || !session_release(memory->session, place, given, SHP_RELEASE_RECALLED)) {
            gpu->credited += given; /* not sent: the agent still counts the credits, and waits for the answer */
            gpu->unanswered++;
            watch(gpu);
        }
    }
    unlock(&gpus->lock);
    return gpu != NULL;
}

/* Handler of a lowered limit: return all idle credits. The caller holds the lock. */
static void lowered(int place, uint64_t before) {
    struct gpu *gpu = gpu_at(place);
    if (gpu->credited > gpu->used)
        give_back(place, gpu->credited - gpu->used);
    if (gpu->used > gpu->memory && gpu->used <= before)
        sys_say("the limit of this pod's GPU memory is now below what this process uses: nothing more can be "
                "allocated until some is freed",
                NULL);
    gpu->tight = true;
    keep_little(gpu);
    moved(gpu);
}

void credits_prepare(struct memory *memory, struct gpus *gpus, struct session *session,
                     bool (*refresh)(int place, bool wait)) {
    memory->gpus = gpus;
    memory->session = session;
    memory->refresh = refresh;
    gpus->lowered = lowered;
    session_route(session, SHP_RECALL, sizeof(struct shp_recall), recalled, memory);
    atomic_store(&the_memory, memory);
}

/* Return the credits that were idle since the last check to the agent, and lower `kept` by as many. Checks continue
 * until no credits are idle and the agent has all reports. The caller holds the lock. */
static void look(int place, struct gpu *gpu, uint64_t now) {
    bool all_sent = reports_sent(place, gpu);
    uint64_t spare = gpu->idle_least;
    if (spare > 0) {
        gpu->kept -= spare < gpu->kept ? spare : gpu->kept;
        give_back(place, spare);
    }
    gpu->idle_least = gpu->credited - gpu->used;
    gpu->watched = gpu->idle_least > 0 || !all_sent;
    gpu->idle_look = now + CREDITS_LOOK_NS;
}

uint64_t credits_step(uint64_t now) {
    struct gpus *gpus = memory_state()->gpus;
    uint64_t due = SYS_NEVER;
    lock(&gpus->lock);
    for (unsigned place = 0; place < gpus->count; place++) {
        struct gpu *gpu = &gpus->gpus[place];
        if (gpu->watched && now >= gpu->idle_look)
            look((int)place, gpu, now);
        if (gpu->watched && gpu->idle_look < due)
            due = gpu->idle_look;
    }
    unlock(&gpus->lock);
    return due;
}

bool credits_view(int place, uint64_t *limit, uint64_t *used) {
    struct memory *memory = memory_state();
    struct gpu *gpu = gpu_at(place);
    struct answer answer;
    uint64_t deadline = sys_now() + SYS_SECOND, now;
    memory_state()->refresh(place, false);
    do { /* try again if all questions were in use, or if the connection was lost */
        lock(&memory->gpus->lock);
        bool enforced = gpu->enforced;
        uint64_t own = gpu->used, idle = gpu->credited - own;
        *limit = gpu->memory;
        *used = own + gpu->siblings;
        unlock(&memory->gpus->lock);
        if (!enforced)
            return false;
        now = sys_now();
        answer = session_ask(memory->session, SHP_MEMINFO, 0, place, idle, deadline > now ? deadline - now : 0);
        if (answer.came) {
            *limit = answer.limit;
            *used = answer.used;
            lock(&memory->gpus->lock);
            gpus_learn_siblings(gpu, answer.used, own);
            unlock(&memory->gpus->lock);
        }
    } while (!answer.came && atomic_load(&memory->session->ready) && sys_now() < deadline);
    return true;
}
