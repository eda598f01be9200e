/* System interface without libc: raw system calls, futex locks, time, memory, and lines on standard error.
 *
 * Guarantees:
 * - No function changes the program's errno.
 * - dl_iterate_phdr is the only function of libc that the hook uses. So the hook works with every glibc since 2.17 and
 *   with musl, and starts even before libpthread is loaded. strings.c has the functions that the compiler needs, such
 *   as memcpy.
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

/* Durations and points in time are in ns. Points in time are of CLOCK_MONOTONIC, as sys_now returns them. */
#define SYS_MS 1000000ull
#define SYS_SECOND 1000000000ull
#define SYS_NEVER UINT64_MAX /* later than any point in time */

/* Make a system call. Return its result, or a negative errno. */
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

/* clock_gettime of the vDSO, which needs no system call. NULL: not looked up yet, or the vDSO has none. */
extern int (*_Atomic sys_clock)(int clock, struct timespec *now);

/* Return the time of CLOCK_MONOTONIC, ns. */
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

/* Return true if a thread of this process with this id exists. */
static inline bool sys_thread_lives(int thread) {
    return thread > 0 && sys_call(SYS_tgkill, sys_process_id(), thread, 0, 0, 0, 0) != -ESRCH;
}

static inline void sys_close(int descriptor) {
    sys_call(SYS_close, descriptor, 0, 0, 0, 0, 0);
}

/* Futex wait: sleep while *word is `expected`, for at most `timeout` ns (SYS_NEVER: without limit). A signal may end
 * the wait early.
 */
static inline void sys_wait(_Atomic uint32_t *word, uint32_t expected, uint64_t timeout) {
    struct timespec time = sys_timespec(timeout == SYS_NEVER ? 0 : timeout);
    sys_call(SYS_futex, (long)word, FUTEX_WAIT_PRIVATE, expected, timeout == SYS_NEVER ? 0 : (long)&time, 0, 0);
}

static inline void sys_wake_all(_Atomic uint32_t *word) {
    sys_call(SYS_futex, (long)word, FUTEX_WAKE_PRIVATE, INT32_MAX, 0, 0, 0);
}

/* Lock between threads of the process. 0: free (also when zeroed); 1: taken; 2: taken, and a thread waits for it. */
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

/* Take the lock if it is free. Return whether it was taken. */
static inline bool try_lock(struct lock *lock) {
    uint32_t expected = 0;
    return atomic_compare_exchange_strong(&lock->word, &expected, 1);
}

static inline void unlock(struct lock *lock) {
    if (atomic_exchange(&lock->word, 0) == 2)
        sys_call(SYS_futex, (long)&lock->word, FUTEX_WAKE_PRIVATE, 1, 0, 0, 0);
}

/* Map zeroed memory; NULL: host memory is exhausted. Linux 4.14 and later zero it again in a child of fork. */
void *sys_map(size_t bytes);
void sys_unmap(void *memory, size_t bytes);

/* Write one line to standard error: "sharepod: " and the parts, which end with NULL. The line is cut at 510 bytes. It
 * is dropped if the write would block. It is also dropped if descriptor 2 no longer refers to the same file as when the
 * program started: the program may have opened a file of its own under that number. */
void sys_say(const char *first, ...);

/* Characters of the longest 64-bit decimal number, with its final zero byte. */
enum { SYS_DECIMAL = 21 };

/* Write a number and a final zero byte at the end of `text`. Return the address of the first digit. */
const char *sys_decimal(uint64_t number, char text[SYS_DECIMAL]);

#endif
