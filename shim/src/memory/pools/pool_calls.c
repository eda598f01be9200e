/* Calls that may let a pool, or what a device keeps for graphs, grow: what is reserved for them before, and what counts
 * after. See memory.h. */
#include "memory/state.h"
#include "memory/credits.h"
#include "memory/pools/pool_memory.h"

/* What pools were seen to grow by, and the least unit of physical memory. */
#define CHUNK_MOST (32ull << 20)
#define CHUNK_LEAST (2ull << 20)
#define REFUSED_TIME (100 * SYS_MS) /* after a refusal memory that is reserved already is used without asking again */
#define TURN_TIME (50 * SYS_MS)     /* how long a call waits for others to end */

/* Whether unused memory of it could serve the call. */
static bool could_reuse(const struct pool_memory *memory, uint64_t bytes) {
    uint64_t reserved, used;
    return pool_figure(memory, false, &reserved) && pool_figure(memory, true, &used) && reserved >= used &&
           reserved - used >= bytes;
}

/* What the driver is expected to grow it by. With the lock. */
static uint64_t step(const struct pool_memory *memory, uint64_t bytes) {
    uint64_t chunk = memory->pool == NULL         ? CHUNK_LEAST
                     : memory_state()->pool_chunk ? memory_state()->pool_chunk
                                                  : CHUNK_MOST;
    uint64_t least = memory_rounded(bytes, CHUNK_LEAST), grown = memory_rounded(bytes, chunk);
    uint64_t left = memory->most > memory->counted ? memory->most - memory->counted : 0;
    if (memory->most > 0 && grown > left) /* not beyond its own maximum */
        return least > left ? least : memory_rounded(left, CHUNK_LEAST);
    return grown;
}

/* Whether the step in which the driver grows pools can be no smaller than `chunk`. With the lock. */
static bool step_known(void) {
    return memory_state()->pool_chunk > 0 && memory_state()->pool_surplus >= memory_state()->pool_chunk / 2;
}

/* As the driver grows; or, as long as that may be less than expected, as little as there has to be. */
static bool reserve_new(struct pool_call *call, bool exact) {
    uint64_t least = memory_rounded(call->bytes, CHUNK_LEAST);
    if (exact || call->reserved == least)
        return credits_reserve(call->memory->place, call->reserved);
    if (credits_reserve_ahead(call->memory->place, call->reserved))
        return true;
    call->reserved = least;
    return credits_reserve(call->memory->place, least);
}

/* Waits, for a while, until no call has it for itself, or, if `alone`, until no call is under way. With the lock, and
 * may let go of it meanwhile. */
static bool await_turn(struct pool_memory *memory, bool alone) {
    uint64_t deadline = 0, now;
    while (memory->alone || (alone && memory->busy > 0)) {
        uint32_t calls = memory->calls;
        now = sys_now();
        deadline = deadline ? deadline : now + TURN_TIME;
        if (now >= deadline)
            return false;
        memory->awaited = true;
        memory_unlock();
        sys_wait(&memory->calls, calls, deadline - now);
        memory_lock();
    }
    return true;
}

/* Others may have it again. With the lock. */
static void leave_turn(struct pool_call *call) {
    struct pool_memory *memory = call->memory;
    if (call->alone)
        memory->alone = call->alone = false;
    memory->calls++;
    if (memory->awaited)
        sys_wake_all(&memory->calls);
    memory->awaited = false;
}

/* For a call without a reservation: whether what is reserved of the device already can serve it. Then the call has it
 * for itself, so that no other takes what this one was promised. What the graph was seen to have is sure. */
static bool reuse_alone(struct pool_call *call, enum pool_reuse may_reuse) {
    struct pool_memory *memory = call->memory;
    uint64_t there;
    call->reserved = 0;
    if (may_reuse == REUSE_SURE)
        return true;
    memory_lock();
    if (await_turn(memory, true))
        memory->alone = call->alone = true;
    memory_unlock();
    if (could_reuse(memory, call->bytes) ||
        (may_reuse == REUSE_LIKELY && pool_figure(memory, false, &there) && there >= call->bytes))
        return true;
    memory_lock();
    leave_turn(call);
    memory_unlock();
    return false;
}

static bool reserve(struct pool_call *call, enum pool_reuse may_reuse) {
    struct pool_memory *memory = call->memory;
    memory_lock();
    bool exact = memory->pool == NULL || step_known();
    uint64_t until = memory->refused_until, wanted = step(memory, call->bytes);
    memory_unlock();
    call->learns = !exact;
    call->reserved = wanted;
    if (credits_take(memory->place, call->reserved))
        return true;
    bool reuse = may_reuse == REUSE_SURE || could_reuse(memory, call->bytes);
    if (reuse && (!atomic_load(&memory_state()->session->ready) || sys_now() < until))
        return reuse_alone(call, may_reuse);
    if (reserve_new(call, exact))
        return true;
    call->reserved = wanted;
    if (!reuse && pool_trim(memory) && reserve_new(call, exact))
        return true;
    memory_lock();
    memory->refused_until = sys_now() + REFUSED_TIME;
    memory_unlock();
    return reuse_alone(call, may_reuse);
}

/* What a pool grew by for one call says in what steps the driver grows pools: they divide it, and are larger than what
 * it has beyond what the call needed. With the lock. */
static void learn(const struct pool_call *call, uint64_t now) {
    struct memory *all = memory_state();
    if (!call->learns || call->memory->most > 0 || now <= call->before)
        return;
    uint64_t grown = now - call->before, chunk = grown & (~grown + 1); /* the largest power of two in it */
    uint64_t needed = memory_rounded(call->bytes, CHUNK_LEAST), surplus = grown > needed ? grown - needed : 0;
    chunk = chunk > CHUNK_MOST ? CHUNK_MOST : chunk < CHUNK_LEAST ? CHUNK_LEAST : chunk;
    if (all->pool_chunk == 0 || chunk < all->pool_chunk || surplus >= all->pool_chunk)
        all->pool_chunk = chunk;
    if (surplus > all->pool_surplus)
        all->pool_surplus = surplus;
}

bool pool_call_begin(struct pool_call *call, struct pool_memory *memory, uint64_t bytes, enum pool_reuse may_reuse) {
    *call = (struct pool_call){.memory = memory, .bytes = bytes};
    if (memory->place < 0) {
        call->memory = NULL; /* of a GPU that is none of the tenant's */
        return gpus_ungated(memory_state()->gpus);
    }
    if (!reserve(call, may_reuse))
        return false;
    uint32_t calls = 0;
    bool learns = call->learns && pool_read(memory, &calls, &call->before);
    memory_lock();
    if (!call->alone)
        await_turn(memory, false);
    memory->busy++;
    memory->calls++;
    call->calls = memory->calls;
    call->learns = learns && call->calls == calls + 1; /* no other call was under way */
    memory->counted += call->reserved;
    memory->pending += call->reserved;
    bool watched = memory_state()->pools_watched;
    memory_state()->pools_watched = true;
    memory_unlock();
    if (!watched)
        session_wake();
    return true;
}

/* The call is over; `more`: credits that are in use for it now. With the lock. */
static void finish_call(struct pool_call *call, uint64_t more) {
    struct pool_memory *memory = call->memory;
    memory->busy--;
    leave_turn(call);
    memory->pending -= call->reserved;
    memory->counted += more;
}

bool pool_call_end(struct pool_call *call) {
    struct pool_memory *memory = call->memory;
    uint64_t now = 0, less = 0;
    uint32_t calls;
    if (memory == NULL)
        return true;
    bool there = pool_read(memory, &calls, &now);
    memory_lock();
    if (there && memory->calls == calls && memory->busy == 1 && calls == call->calls)
        learn(call, now);
    uint64_t more = there && now > memory->counted ? now - memory->counted : 0;
    memory_unlock();
    if (more > 0 && !credits_reserve(memory->place, more))
        return false;
    memory_lock();
    bool last = memory->calls == calls;
    finish_call(call, more);
    if (there && last)
        less = pool_lower(memory, memory->calls, now);
    memory_unlock();
    credits_return(memory->place, less);
    return true;
}

void pool_call_close(struct pool_call *call) {
    memory_lock();
    finish_call(call, 0);
    memory_unlock();
    pool_settle(call->memory);
}
