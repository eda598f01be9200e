/* Calls that may let a pool, or what a device keeps for graphs, grow: what is reserved for them before, and what counts
 * after. See growing.h. */
#include "memory/lock.h"
#include "memory/credits.h"
#include "memory/pool_memory.h"

/* What pools were seen to grow by, and the least unit of physical memory. */
#define CHUNK_MOST (32ull << 20)
#define CHUNK_LEAST (2ull << 20)
#define REFUSED_TIME (100 * SYS_MS) /* after a refusal memory that is reserved already is used without asking again */
#define TURN_TIME (50 * SYS_MS)     /* how long a call waits for others to end */

/* Whether unused memory of it could serve the call. */
static bool could_reuse(const struct growing *growing, uint64_t bytes) {
    uint64_t reserved, used;
    return growing_figure(growing, false, &reserved) &&
           growing_figure(growing, true, &used) && reserved >= used && reserved - used >= bytes;
}

/* What the driver is expected to grow it by. With the lock. */
static uint64_t step(const struct growing *growing, uint64_t bytes) {
    uint64_t chunk = growing->pool == NULL ? CHUNK_LEAST : books()->chunk ? books()->chunk : CHUNK_MOST;
    uint64_t least = memory_rounded(bytes, CHUNK_LEAST), grown = memory_rounded(bytes, chunk);
    uint64_t left = growing->most > growing->counted ? growing->most - growing->counted : 0;
    if (growing->most > 0 && grown > left) /* not beyond its own maximum */
        return least > left ? least : memory_rounded(left, CHUNK_LEAST);
    return grown;
}

/* Whether the step in which the driver grows pools can be no smaller than `chunk`. With the lock. */
static bool step_known(void) {
    return books()->chunk > 0 && books()->surplus >= books()->chunk / 2;
}

/* As the driver grows; or, as long as that may be less than expected, as little as there has to be. */
static bool reserve_new(struct growth *growth, bool exact) {
    uint64_t least = memory_rounded(growth->bytes, CHUNK_LEAST);
    if (exact || growth->reserved == least)
        return credits_reserve(growth->growing->place, growth->reserved);
    if (credits_reserve_ahead(growth->growing->place, growth->reserved))
        return true;
    growth->reserved = least;
    return credits_reserve(growth->growing->place, least);
}

/* Waits, for a while, until no call has it for itself, or, if `alone`, until no call is under way. With the lock, and may
 * let go of it meanwhile. */
static bool await_turn(struct growing *growing, bool alone) {
    uint64_t deadline = 0, now;
    while (growing->alone || (alone && growing->busy > 0)) {
        uint32_t calls = growing->calls;
        now = sys_now();
        deadline = deadline ? deadline : now + TURN_TIME;
        if (now >= deadline)
            return false;
        growing->awaited = true;
        books_unlock();
        sys_wait(&growing->calls, calls, deadline - now);
        books_lock();
    }
    return true;
}

/* Others may have it again. With the lock. */
static void leave_turn(struct growth *growth) {
    struct growing *growing = growth->growing;
    if (growth->alone)
        growing->alone = growth->alone = false;
    growing->calls++;
    if (growing->awaited)
        sys_wake_all(&growing->calls);
    growing->awaited = false;
}

/* For a call without a reservation: whether what is reserved of the device already can serve it. Then the call has it
 * for itself, so that no other takes what this one was promised. What the graph was seen to have is sure. */
static bool reuse_alone(struct growth *growth, enum growing_reuse may_reuse) {
    struct growing *growing = growth->growing;
    uint64_t there;
    growth->reserved = 0;
    if (may_reuse == REUSE_SURE)
        return true;
    books_lock();
    if (await_turn(growing, true))
        growing->alone = growth->alone = true;
    books_unlock();
    if (could_reuse(growing, growth->bytes) ||
        (may_reuse == REUSE_LIKELY && growing_figure(growing, false, &there) && there >= growth->bytes))
        return true;
    books_lock();
    leave_turn(growth);
    books_unlock();
    return false;
}

static bool reserve(struct growth *growth, enum growing_reuse may_reuse) {
    struct growing *growing = growth->growing;
    books_lock();
    bool exact = growing->pool == NULL || step_known();
    uint64_t until = growing->refused_until, wanted = step(growing, growth->bytes);
    books_unlock();
    growth->learns = !exact;
    growth->reserved = wanted;
    if (credits_take(growing->place, growth->reserved))
        return true;
    bool reuse = may_reuse == REUSE_SURE || could_reuse(growing, growth->bytes);
    if (reuse && (!atomic_load(&books()->session->ready) || sys_now() < until))
        return reuse_alone(growth, may_reuse);
    if (reserve_new(growth, exact))
        return true;
    growth->reserved = wanted;
    if (!reuse && growing_trim(growing) && reserve_new(growth, exact))
        return true;
    books_lock();
    growing->refused_until = sys_now() + REFUSED_TIME;
    books_unlock();
    return reuse_alone(growth, may_reuse);
}

/* What a pool grew by for one call says in what steps the driver grows pools: they divide it, and are larger than what
 * it has beyond what the call needed. With the lock. */
static void learn(const struct growth *growth, uint64_t now) {
    struct memory *all = books();
    if (!growth->learns || growth->growing->most > 0 || now <= growth->before)
        return;
    uint64_t grown = now - growth->before, chunk = grown & (~grown + 1); /* the largest power of two in it */
    uint64_t needed = memory_rounded(growth->bytes, CHUNK_LEAST), surplus = grown > needed ? grown - needed : 0;
    chunk = chunk > CHUNK_MOST ? CHUNK_MOST : chunk < CHUNK_LEAST ? CHUNK_LEAST : chunk;
    if (all->chunk == 0 || chunk < all->chunk || surplus >= all->chunk)
        all->chunk = chunk;
    if (surplus > all->surplus)
        all->surplus = surplus;
}

bool growing_begin(struct growth *growth, struct growing *growing, uint64_t bytes, enum growing_reuse may_reuse) {
    *growth = (struct growth){.growing = growing, .bytes = bytes};
    if (growing->place < 0) {
        growth->growing = NULL; /* of a GPU that is none of the tenant's */
        return gpus_ungated(books()->gpus);
    }
    if (!reserve(growth, may_reuse))
        return false;
    uint32_t calls = 0;
    bool learns = growth->learns && growing_read(growing, &calls, &growth->before);
    books_lock();
    if (!growth->alone)
        await_turn(growing, false);
    growing->busy++;
    growing->calls++;
    growth->calls = growing->calls;
    growth->learns = learns && growth->calls == calls + 1; /* no other call was under way */
    growing->counted += growth->reserved;
    growing->pending += growth->reserved;
    bool watched = books()->growing_watched;
    books()->growing_watched = true;
    books_unlock();
    if (!watched)
        session_wake();
    return true;
}

/* The call is over; `more`: credits that are in use for it now. With the lock. */
static void finish_call(struct growth *growth, uint64_t more) {
    struct growing *growing = growth->growing;
    growing->busy--;
    leave_turn(growth);
    growing->pending -= growth->reserved;
    growing->counted += more;
}

bool growing_end(struct growth *growth) {
    struct growing *growing = growth->growing;
    uint64_t now = 0, less = 0;
    uint32_t calls;
    if (growing == NULL)
        return true;
    bool there = growing_read(growing, &calls, &now);
    books_lock();
    if (there && growing->calls == calls && growing->busy == 1 && calls == growth->calls)
        learn(growth, now);
    uint64_t more = there && now > growing->counted ? now - growing->counted : 0;
    books_unlock();
    if (more > 0 && !credits_reserve(growing->place, more))
        return false;
    books_lock();
    bool last = growing->calls == calls;
    finish_call(growth, more);
    if (there && last)
        less = growing_lower(growing, growing->calls, now);
    books_unlock();
    credits_return(growing->place, less);
    return true;
}

void growing_close(struct growth *growth) {
    books_lock();
    finish_call(growth, 0);
    books_unlock();
    growing_settle(growth->growing);
}
