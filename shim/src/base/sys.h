/* The kernel without libc: raw system calls, futex locks, time, memory, one line on standard error.
 *
 * Guarantees:
 * - the program's errno stays as it is;
 * - nothing is taken from libc but dl_iterate_phdr: the hook lives in programs of every glibc since 2.17 and of musl,
 *   and starts before libpthread may be there. What the compiler asks for (memcpy and its like) is in strings.c.
 */
#ifndef SHAREPOD_SYS_H
#define SHAREPOD_SYS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>

/* Durations and points in time are nanoseconds; points in time are CLOCK_MONOTONIC's, as sys_now returns them. */
#define SYS_MS 1000000ull
#define SYS_SECOND 1000000000ull
#define SYS_NEVER UINT64_MAX /* a point in time that is never reached */

/* Make a system call. Return the kernel's answer: a result, or a negative errno. */
static inline long sys_call(long number, long a, long b, long c, long d, long e, long f) {
#if defined(__x86_64__)
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
#elif defined(__aarch64__)
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
#else
#error "the hook is built for x86-64 and arm64"
#endif
}

/* The vdso's clock_gettime, which needs no system call. NULL: not looked for yet, or there is none. */
extern int (*_Atomic sys_clock)(int clock, struct timespec *now);

/* Return the time, ns. */
static inline uint64_t sys_now(void) {
    struct timespec now;
    int (*clock)(int, struct timespec *) = atomic_load_explicit(&sys_clock, memory_order_relaxed);
    if (clock == NULL || clock(CLOCK_MONOTONIC, &now) != 0)
        sys_call(SYS_clock_gettime, CLOCK_MONOTONIC, (long)&now, 0, 0, 0, 0);
    return (uint64_t)now.tv_sec * SYS_SECOND + (uint64_t)now.tv_nsec;
}

static inline struct timespec sys_timespec(uint64_t ns) {
    return (struct timespec){.tv_sec = (time_t)(ns / SYS_SECOND), .tv_nsec = (long)(ns % SYS_SECOND)};
}

static inline void sys_sleep(uint64_t ns) {
    struct timespec time = sys_timespec(ns);
    sys_call(SYS_nanosleep, (long)&time, 0, 0, 0, 0, 0);
}

static inline int sys_thread_id(void) {
    return (int)sys_call(SYS_gettid, 0, 0, 0, 0, 0, 0);
}

static inline int sys_process_id(void) {
    return (int)sys_call(SYS_getpid, 0, 0, 0, 0, 0, 0);
}

/* Return whether a thread of this process still lives. */
static inline bool sys_thread_lives(int thread) {
    return thread > 0 && sys_call(SYS_tgkill, sys_process_id(), thread, 0, 0, 0, 0) != -ESRCH;
}

static inline void sys_close(int descriptor) {
    sys_call(SYS_close, descriptor, 0, 0, 0, 0, 0);
}

/* Wait while *word is `expected`, at most `timeout` ns (SYS_NEVER: no limit). A signal may end the wait early. */
static inline void sys_wait(_Atomic uint32_t *word, uint32_t expected, uint64_t timeout) {
    struct timespec time = sys_timespec(timeout == SYS_NEVER ? 0 : timeout);
    sys_call(SYS_futex, (long)word, FUTEX_WAIT_PRIVATE, expected, timeout == SYS_NEVER ? 0 : (long)&time, 0, 0);
}

static inline void sys_wake_all(_Atomic uint32_t *word) {
    sys_call(SYS_futex, (long)word, FUTEX_WAKE_PRIVATE, INT32_MAX, 0, 0, 0);
}

/* A lock of the process's threads, zeroed when free: 0 free, 1 taken, 2 taken and waited for. */
struct lock {
    _Atomic uint32_t word;
};

static inline void lock(struct lock *lock) {
    uint32_t expected = 0;
    if (atomic_compare_exchange_strong(&lock->word, &expected, 1))
        return;
    while (atomic_exchange(&lock->word, 2) != 0)
        sys_wait(&lock->word, 2, SYS_NEVER);
}

/* Take the lock if it is free. */
static inline bool try_lock(struct lock *lock) {
    uint32_t expected = 0;
    return atomic_compare_exchange_strong(&lock->word, &expected, 1);
}

static inline void unlock(struct lock *lock) {
    if (atomic_exchange(&lock->word, 0) == 2)
        sys_call(SYS_futex, (long)&lock->word, FUTEX_WAKE_PRIVATE, 1, 0, 0, 0);
}

/* Return fresh zeroed memory, which a child of fork finds zeroed again (where the kernel can: since 4.14). NULL: the
 * kernel gives none. */
void *sys_map(size_t bytes);
void sys_unmap(void *memory, size_t bytes);

/* Write one line on standard error, after "sharepod: ". Skip the line if there is no room for it at once, or if
 * descriptor 2 is another file than when the program started: it may have opened its own file under the number. The
 * parts end with NULL; a line is cut at 510 bytes. */
void sys_say(const char *first, ...);

/* Characters of the longest decimal number, with its final zero. */
enum { SYS_DECIMAL = 21 };

/* Write a number, with its final zero, at the end of `text`. Return where it begins. */
const char *sys_decimal(uint64_t number, char text[SYS_DECIMAL]);

#endif
