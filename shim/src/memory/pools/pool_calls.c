/* Calls that may make a pool grow: the charge before each, and the count after it (C8).
 *
 * The driver grows a pool in undocumented steps that differ between drivers. Until the step is known, a call charges
 * the largest step that was ever observed. If the limit does not allow that, it charges the least that the call can
 * take. The growth of calls that have exclusive use of the pool shows the step.
 */
#include "memory/state.h"
#include "memory/credits.h"
#include "memory/pools/pool_memory.h"
#include "memory/refusal.h"

/* Bytes: largest step in which a driver was seen to grow pools, and the granularity of physical memory. */
#define CHUNK_MOST (32ull << 20)
#define CHUNK_LEAST (2ull << 20)
/* Time after a refusal during which calls use memory that the pool has, without a request to the agent. So a tenant at
 * its limit that allocates and frees in a loop sends ten requests a second, not one per call. */
#define REFUSED_TIME (100 * SYS_MS)
/* Longest time for which a call waits for other calls of the pool to end. TURN_TIME is many times the duration of an
 * allocation call. GRAPH_TURN_TIME is shorter, because calls of a graph pool are launches, which may wait at the gate
 * for long. */
#define TURN_TIME (1000 * SYS_MS)
#define GRAPH_TURN_TIME (50 * SYS_MS)

/* Return true if, by the driver's byte counts, the pool has `bytes` bytes of unused memory. */
static bool could_reuse(const struct pool_memory *memory, uint64_t bytes) {
    uint64_t reserved, used;
    return pool_figure(memory, false, &reserved) && pool_figure(memory, true, &used) && reserved >= used &&
           reserved - used >= bytes;
}

/* Return the bytes by which the driver is expected to grow the pool. The caller holds the lock. */
static uint64_t step(const struct pool_memory *memory, uint64_t bytes) {
    uint64_t chunk = memory->pool == NULL         ? CHUNK_LEAST
                     : memory_state()->pool_chunk ? memory_state()->pool_chunk
                                                  : CHUNK_MOST;
    uint64_t least = memory_rounded(bytes, CHUNK_LEAST), grown = memory_rounded(bytes, chunk);
    uint64_t left = memory->most > memory->counted ? memory->most - memory->counted : 0;
    if (memory->most > 0 && grown > left) /* the pool does not grow over its own maximum */
        return least > left ? least : memory_rounded(left, CHUNK_LEAST);
    return grown;
}

/* Return true if the driver's step is known to be pool_chunk, because a growth was seen that no smaller step explains.
 * The caller holds the lock. */
static bool step_known(void) {
    return memory_state()->pool_chunk > 0 && memory_state()->pool_surplus >= memory_state()->pool_chunk / 2;
}

/* Return true if the charge must be the expected growth, and may not be reduced to the least possible growth. The
 * caller holds the lock. */
static bool is_exact(const struct pool_call *call) {
    return !call->learns || call->memory->origin == POOL_SHAREABLE;
}

/* Charge the expected growth. Unless `exact`, charge the least possible growth if the agent refuses the expected one.
 */
static bool reserve_new(struct pool_call *call, bool exact) {
    uint64_t least = memory_rounded(call->bytes, CHUNK_LEAST);
    if (exact || call->reserved == least)
        return credits_reserve(call->memory->place, call->reserved);
    if (credits_reserve_ahead(call->memory->place, call->reserved))
        return true;
    call->reserved = least;
    return credits_reserve(call->memory->place, least);
}

/* Wait until no call has exclusive use of the pool. If `alone`, also wait until no call is under way or about to begin.
 * Return false after TURN_TIME (GRAPH_TURN_TIME for a graph pool). The caller holds the lock, which is released during
 * the wait. */
static bool await_turn(struct pool_memory *memory, bool alone) {
    uint64_t deadline = 0, now;
    while (memory->alone || (alone && (memory->busy > 0 || memory->charging > 0))) {
        uint32_t calls = memory->calls;
        now = sys_now();
        deadline = deadline ? deadline : now + (memory->pool == NULL ? GRAPH_TURN_TIME : TURN_TIME);
        if (now >= deadline)
            return false;
        memory->awaited = true;
        memory_unlock();
        sys_wait(&memory->calls, calls, deadline - now);
        memory_lock();
    }
    return true;
}

/* Wake the threads that wait for the pool. The caller holds the lock. */
static void wake(struct pool_memory *memory) {
    memory->calls++;
    if (memory->awaited)
        sys_wake_all(&memory->calls);
    memory->awaited = false;
}

/* End a call's exclusive use of the pool, if it has it, and wake waiting threads. The caller holds the lock. */
static void leave_turn(struct pool_call *call) {
    if (call->alone)
        call->memory->alone = call->alone = false;
    wake(call->memory);
}

/* Record that the call gives up its charge. The caller holds the lock. */
static void end_charge(struct pool_call *call) {
    call->charging = false;
    call->memory->charging--;
    wake(call->memory);
}

/* Let a call begin without a charge. Return true if memory that the pool has can serve it; the call then has exclusive
 * use of the pool, so that no other call takes that memory (C8). Otherwise charge `wanted` bytes once more, but only if
 * other calls have charged growth since memory->calls was `calls`: they may have returned a part of it. */
static bool reuse_alone(struct pool_call *call, enum pool_reuse may_reuse, uint64_t wanted, uint32_t calls) {
    struct pool_memory *memory = call->memory;
    uint64_t there;
    call->reserved = 0;
    if (may_reuse == REUSE_SURE)
        return true;
    memory_lock();
    bool again = memory->busy > 0 || memory->charging > 1 || memory->calls != calls;
    end_charge(call);
    if (await_turn(memory, true))
        memory->alone = call->alone = true;
    bool overgrown = memory->overgrown, exact = is_exact(call);
    memory_unlock();
    if (!overgrown && (could_reuse(memory, call->bytes) ||
                       (may_reuse == REUSE_LIKELY && pool_figure(memory, false, &there) && there >= call->bytes)))
        return true;
    bool reserved = false;
    if (call->alone && again) {
        pool_settle_alone(memory);
        call->reserved = wanted;
        reserved = reserve_new(call, exact);
    }
    memory_lock();
    if (!reserved)
        leave_turn(call);
    memory_unlock();
    return reserved;
}

/* Charge a call, or find memory that the pool already has. The attempts, cheapest first:
 * 1. Idle credits for the expected growth.
 * 2. Memory that the pool has, if the agent is absent or has recently refused.
 * 3. Credits of the agent.
 * 4. Credits of the agent after a trim of the pool.
 * 5. Memory that the pool has, or a charge that other calls have returned. */
static bool reserve(struct pool_call *call, enum pool_reuse may_reuse) {
    struct pool_memory *memory = call->memory;
    memory_lock();
    call->learns = memory->pool != NULL && !step_known();
    bool exact = is_exact(call);
    uint64_t until = memory->overgrown ? 0 : memory->refused_until, wanted = step(memory, call->bytes);
    uint32_t calls = memory->calls;
    memory->charging++;
    call->charging = true;
    memory_unlock();
    call->reserved = wanted;
    if (credits_take(memory->place, call->reserved)) /* 1 */
        return true;
    bool reuse = may_reuse == REUSE_SURE || could_reuse(memory, call->bytes);
    if (reuse && (!atomic_load(&memory_state()->session->ready) || sys_now() < until)) /* 2 */
        return reuse_alone(call, may_reuse, wanted, calls);
    if (reserve_new(call, exact)) { /* 3 */
        memory_lock();
        memory->overgrown = false;
        memory_unlock();
        return true;
    }
    call->reserved = wanted;
    if (!reuse && pool_trim(memory) && reserve_new(call, exact)) /* 4 */
        return true;
    memory_lock();
    memory->refused_until = sys_now() + REFUSED_TIME;
    memory_unlock();
    return reuse_alone(call, may_reuse, wanted, calls); /* 5 */
}

/* Learn the driver's step from the growth by one call. The growth is a multiple of the step, and exceeds the call's
 * need by less than the step. `now`: bytes reserved after the call. The caller holds the lock. */
static void learn(const struct pool_call *call, uint64_t now) {
    struct memory *all = memory_state();
    if (!call->learns || call->memory->most > 0 || now <= call->before)
        return;
    uint64_t grown = now - call->before,
             chunk = grown & (~grown + 1); /* the largest power of two that divides `grown` */
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
        call->memory = NULL; /* not a GPU of the tenant */
        return gpus_ungated(memory_state()->gpus);
    }
    if (!reserve(call, may_reuse)) {
        refusal_say(memory->place, bytes);
        return false;
    }
    uint32_t calls = 0;
    bool learns = call->learns && pool_read(memory, &calls, &call->before);
    memory_lock();
    if (!call->alone)
        await_turn(memory, false);
    memory->charging -= call->charging;
    memory->busy++;
    memory->calls++;
    call->calls = memory->calls;
    call->learns = learns && call->calls == calls + 1; /* no other call began or ended since `before` was read */
    memory->counted += call->reserved;
    memory->pending += call->reserved;
    bool watched = memory_state()->pools_watched;
    memory_state()->pools_watched = true;
    memory_unlock();
    if (!watched)
        session_wake();
    return true;
}

/* End a call. `more`: bytes that were charged for the call after it was made. The caller holds the lock. */
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
    if (more > 0 && !credits_reserve(memory->place, more)) {
        refusal_say(memory->place, call->bytes);
        return false;
    }
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
    call->memory->overgrown = call->memory->origin == POOL_SHAREABLE;
    memory_unlock();
    pool_settle(call->memory);
}
