/* The functions of sys.h that are not time-critical: mapped memory, and messages on standard error. */
#include "base/sys.h"

#include <poll.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

int (*_Atomic sys_clock)(int clock, struct timespec *now);

void *sys_map(size_t bytes) {
    long memory = sys_call(SYS_mmap, 0, (long)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory < 0 && memory > -4096)
        return NULL;
    sys_call(SYS_madvise, memory, (long)bytes, MADV_WIPEONFORK, 0, 0, 0);
    return (void *)memory;
}

void sys_unmap(void *memory, size_t bytes) {
    if (memory != NULL)
        sys_call(SYS_munmap, (long)memory, (long)bytes, 0, 0, 0, 0);
}

/* The file behind descriptor 2 when the program started. It is a plain variable, which a fork does not zero: a child
 * has the same standard error. */
static struct file {
    uint64_t device, inode;
} errors;
static _Atomic bool errors_known;

/* Return the file behind descriptor 2; all zero: it is closed. */
static struct file errors_now(void) {
    struct stat facts;
    bool open = sys_call(SYS_fstat, 2, (long)&facts, 0, 0, 0, 0) == 0;
    return open ? (struct file){.device = facts.st_dev, .inode = facts.st_ino} : (struct file){0};
}

/* Store the file of standard error when the hook is loaded, before the program can open a file of its own as descriptor
 * 2. Constructors of other libraries may run earlier. */
__attribute__((constructor)) static void keep_errors(void) {
    if (!atomic_load(&errors_known))
        errors = errors_now();
    atomic_store(&errors_known, true);
}

const char *sys_decimal(uint64_t number, char text[SYS_DECIMAL]) {
    char *at = text + SYS_DECIMAL - 1;
    *at = '\0';
    do {
        *--at = (char)('0' + number % 10);
        number /= 10;
    } while (number > 0);
    return at;
}

void sys_say(const char *first, ...) {
    keep_errors();
    struct file now = errors_now();
    if (now.inode == 0 || now.inode != errors.inode || now.device != errors.device)
        return; /* descriptor 2 is a file that the program has opened */
    char text[512];
    size_t length = 0;
    const char *part = "sharepod: ";
    va_list parts;
    va_start(parts, first);
    for (const char *next = first; part != NULL; part = next, next = next ? va_arg(parts, const char *) : NULL)
        for (; *part != '\0' && length < sizeof text - 1; part++)
            text[length++] = *part;
    va_end(parts);
    text[length++] = '\n';
    struct pollfd file = {.fd = 2, .events = POLLOUT};
    struct timespec at_once = {0};
    long answer = sys_call(SYS_ppoll, (long)&file, 1, (long)&at_once, 0, 8, 0);
    if (answer < 0 || file.revents == POLLOUT) /* writing to a full pipe would block the hook; writing to a pipe without
                                                  a reader would end the program by SIGPIPE */
        sys_call(SYS_write, 2, (long)text, (long)length, 0, 0, 0);
}
