/* Watched and kept descriptors of exported memory.
 *
 * One read of /proc/thread-self/fdinfo shows all open descriptors, and takes time in proportion to their number n.
 * exports_count_seldom reads it only in every (n / COUNT_PART)th call. So the average cost per call does not depend on
 * n.
 *
 * An entry of an epoll instance is a pair of file and descriptor number. EPOLL_CTL_MOD fails if the number refers to
 * another file. So it shows whether the kept file is still open under its number.
 */
#include "memory/exports.h"

#include <fcntl.h>
#include <string.h>
#include <sys/epoll.h>

#include "base/descriptors.h"
#include "base/hashed.h"
#include "base/sys.h"
#include "memory/state.h"

/* A descriptor that the driver has exported. The lock of struct gpus guards it. */
struct export {
    struct hash_link link; /* link in exports_table, by the address of this struct */
    struct export *next;
    uint32_t *open_count; /* counter of the exported memory's open descriptors */
    bool open;            /* the present count has found it open */
};

enum { COUNT_PART = 16 }; /* lines of fdinfo that exports_count_seldom reads per call, on average */
enum {
    KEPT_MOST = 4096
}; /* kept copies have numbers below this, a bit each in `kept`, so that a child of fork finds
      them */

/* Plain variables, which a fork does not zero, so that a child can close these descriptors. The marker is an entry of
 * the hook's epoll instance, by which the hook recognizes the instance. */
static _Atomic int instance = -1;
static struct descriptor marker = DESCRIPTOR_NONE;
static _Atomic uint64_t kept[KEPT_MOST / 64];

/* Add, change or remove the entry of descriptor `number` in the epoll instance `into` (EPOLL_CTL_ADD, MOD or DEL).
 * `data`: a value that fdinfo shows. Return 0 or a negative errno. */
static long enter(int into, int operation, int number, void *data) {
    struct epoll_event nothing = {.events = 0, .data.ptr = data};
    return sys_call(SYS_epoll_ctl, into, operation, number, (long)&nothing, 0, 0);
}

/* Return the descriptor of the epoll instance; -1: there is none, or the program has closed it. */
static int present(void) {
    int number = atomic_load(&instance), mark = descriptor_number(&marker);
    return number >= 0 && mark >= 0 && enter(number, EPOLL_CTL_MOD, mark, NULL) == 0 ? number : -1;
}

/* Return the descriptor of the epoll instance, created if necessary; -1: too many open files. The caller holds the
 * lock. */
static int prepare(void) {
    int ends[2], number = present();
    if (number >= 0 || sys_call(SYS_pipe2, (long)ends, O_CLOEXEC, 0, 0, 0, 0) != 0)
        return number;
    sys_close(ends[1]);
    descriptor_close(&marker);
    if (!descriptor_keep(&marker, ends[0]))
        return -1;
    number = descriptor_move((int)sys_call(SYS_epoll_create1, EPOLL_CLOEXEC, 0, 0, 0, 0, 0));
    if (number < 0)
        return -1;
    enter(number, EPOLL_CTL_ADD, descriptor_number(&marker), NULL);
    atomic_store(&instance, number);
    return number;
}

bool exports_watch(uint32_t *open, int descriptor) {
    struct memory *memory = memory_state();
    memory_lock();
    /* count first: entries of descriptors that were closed since the last count are freed */
    if (memory->export_count >= memory->export_most) {
        exports_count();
        memory->export_most = 2 * memory->export_count + 64;
    }
    int number = hashed_room(&memory->exports_table) ? prepare() : -1;
    struct export *export = number >= 0 ? slab_take(&memory->export_slab, sizeof *export) : NULL;
    bool watched = export != NULL;
    if (watched) {
        long result = enter(number, EPOLL_CTL_ADD, descriptor, export);
        if (result == -EEXIST)
            result = enter(number, EPOLL_CTL_MOD, descriptor, export);
        if (result == 0) {
            *export = (struct export){.next = memory->exports, .open_count = open};
            memory->exports = export;
            memory->export_count++;
            hashed_add(&memory->exports_table, &export->link, hash_of((uintptr_t)export, 0));
            ++*open;
        } else {
            slab_give(&memory->export_slab, export);
            watched = result == -EPERM; /* epoll cannot watch this kind of file: the memory counts as not exported */
        }
    }
    memory_unlock();
    return watched;
}

/* Record that the export with this value of `data` is open. `data`: address of its struct export. */
static void found(uint64_t data) {
    const struct hashed *table = &memory_state()->exports_table;
    uint64_t hash = hash_of(data, 0);
    for (struct hash_link *link = NULL; (link = hashed_next(table, hash, link)) != NULL;)
        if ((uintptr_t)link == data)
            ((struct export *)link)->open = true;
}

/* Read the fdinfo of the epoll instance, and call found() for each entry: its value is the hexadecimal number after
 * "data:". Return false if fdinfo cannot be read. The path is that of this thread, because /proc/self has no
 * descriptors once the process's first thread has ended.
 */
static bool read_entries(int number) {
    static const char before[] = "data:", folder[] = "/proc/thread-self/fdinfo/";
    char path[sizeof folder + SYS_DECIMAL] = "/proc/thread-self/fdinfo/", digits[SYS_DECIMAL], text[512];
    const char *next = sys_decimal((uint64_t)number, digits);
    for (char *end = path + sizeof folder - 1; (*end = *next) != '\0'; end++)
        next++;
    long file = sys_call(SYS_openat, AT_FDCWD, (long)path, O_RDONLY | O_CLOEXEC, 0, 0, 0), size = 0;
    if (file < 0)
        return false;
    unsigned matched = 0; /* characters of `before` */
    bool inside = false, begun = false;
    uint64_t data = 0;
    while ((size = sys_call(SYS_read, file, (long)text, sizeof text, 0, 0, 0)) > 0)
        for (long i = 0; i < size; i++) {
            char c = text[i];
            int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
            if (inside && digit >= 0) {
                data = data << 4 | (unsigned)digit;
                begun = true;
            } else if (inside && begun) {
                found(data);
                inside = false;
            } else if (!inside) {
                matched = c == before[matched] ? matched + 1 : c == before[0];
                if (matched == sizeof before - 1) {
                    inside = true;
                    begun = false;
                    matched = 0;
                    data = 0;
                }
            }
        }
    sys_close((int)file);
    return size == 0;
}

void exports_count(void) {
    struct memory *memory = memory_state();
    int number = present();
    memory->export_asked = 0;
    if (memory->exports == NULL)
        return;
    if (number >= 0 && !read_entries(number)) /* no /proc: it is unknown which exports are closed */
        return;
    for (struct export **at = &memory->exports, *export; (export = *at) != NULL;) {
        if (export->open) {
            export->open = false;
            at = &export->next;
            continue;
        }
        *at = export->next;
        --*export->open_count;
        memory->export_count--;
        hashed_remove(&memory->exports_table, &export->link);
        slab_give(&memory->export_slab, export);
    }
}

void exports_count_seldom(void) {
    struct memory *memory = memory_state();
    if (++memory->export_asked * COUNT_PART >= memory->export_count)
        exports_count();
}

int exports_keep(int descriptor) {
    memory_lock();
    int number = descriptor_room() ? prepare() : -1, copy = number >= 0 ? descriptor_copy(descriptor) : -1;
    if (copy >= KEPT_MOST || (copy >= 0 && enter(number, EPOLL_CTL_ADD, copy, NULL) != 0)) {
        sys_close(copy);
        copy = -1;
    }
    if (copy >= 0)
        atomic_fetch_or(&kept[copy / 64], 1ull << copy % 64);
    memory_unlock();
    return copy;
}

void exports_let_go(int copy) {
    int number = present();
    if (copy < 0)
        return;
    atomic_fetch_and(&kept[copy / 64], ~(1ull << copy % 64));
    if (number >= 0 && enter(number, EPOLL_CTL_DEL, copy, NULL) == 0)
        sys_close(copy);
}

/* The child shares the epoll instance with its parent, so no entry is removed. */
void exports_after_fork(void) {
    int number = present();
    for (int i = 0; i < KEPT_MOST; i++) {
        bool was = atomic_load(&kept[i / 64]) >> i % 64 & 1;
        if (was && number >= 0 && enter(number, EPOLL_CTL_MOD, i, NULL) == 0)
            sys_close(i);
    }
    memset((void *)kept, 0, sizeof kept);
    if (number >= 0)
        sys_close(number);
    atomic_store(&instance, -1);
    descriptor_close(&marker);
}
