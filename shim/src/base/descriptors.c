/* Kept descriptors: the hook recognizes its own file behind a number by device and inode, as of a pipe or a socket. An
 * eventfd cannot be kept, because all eventfds share one inode. */
#include "base/descriptors.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "base/sys.h"

/* The hook moves its descriptors above the numbers that programs use. END is the process's limit of open files or
 * HIGHEST, whichever is lower. A descriptor gets the first free number from END - ROOM on, else from END / 2 on, else
 * from 3 on. Much higher numbers would enlarge the process's descriptor table, and so slow down each fork. */
enum { HIGHEST = 1024, ROOM = 32 };

static uint64_t limit_of_files(void) {
    struct rlimit limit = {.rlim_cur = 0};
    sys_call(SYS_prlimit64, 0, RLIMIT_NOFILE, 0, (long)&limit, 0, 0);
    return limit.rlim_cur;
}

/* Return the number of free descriptor numbers below `end`, but at most `enough`. */
static uint64_t count_free(uint64_t end, uint64_t enough) {
    uint64_t count = 0;
    for (uint64_t number = end; number > 0 && count < enough; number--)
        count += sys_call(SYS_fcntl, (long)number - 1, F_GETFD, 0, 0, 0, 0) == -EBADF;
    return count;
}

bool descriptor_room(void) {
    uint64_t end = limit_of_files(), wanted = (end / 4 > ROOM ? end / 4 : ROOM) + 1;
    return end > 4 * HIGHEST || count_free(end, wanted) >= wanted; /* exports.c keeps copies below number 4096 */
}

int descriptor_copy(int number) {
    uint64_t limit = limit_of_files(), end = limit < HIGHEST ? limit : HIGHEST;
    if (end < 4 * ROOM)
        return -1;
    const uint64_t least[] = {end - ROOM, end / 2, 3};
    long copy = -1;
    for (unsigned i = 0; i < sizeof least / sizeof *least && copy < 0; i++)
        copy = sys_call(SYS_fcntl, number, F_DUPFD_CLOEXEC, (long)least[i], 0, 0, 0);
    return copy < 0 ? -1 : (int)copy;
}

int descriptor_move(int number) {
    int copy = number >= 0 ? descriptor_copy(number) : -1;
    if (copy < 0)
        return number;
    sys_close(number);
    return copy;
}

bool descriptor_keep(struct descriptor *descriptor, int number) {
    struct stat facts;
    number = descriptor_move(number);
    if (sys_call(SYS_fstat, number, (long)&facts, 0, 0, 0, 0) != 0) {
        sys_close(number);
        return false;
    }
    atomic_store(&descriptor->inode, (uint64_t)facts.st_ino);
    atomic_store(&descriptor->device, (uint64_t)facts.st_dev);
    atomic_store(&descriptor->number, number);
    return true;
}

int descriptor_number(const struct descriptor *descriptor) {
    struct stat facts;
    int number = atomic_load(&descriptor->number);
    if (number < 0 || sys_call(SYS_fstat, number, (long)&facts, 0, 0, 0, 0) != 0)
        return -1;
    return facts.st_ino == atomic_load(&descriptor->inode) && facts.st_dev == atomic_load(&descriptor->device) ? number
                                                                                                               : -1;
}

void descriptor_close(struct descriptor *descriptor) {
    int number = descriptor_number(descriptor);
    atomic_store(&descriptor->number, -1);
    if (number >= 0)
        sys_close(number);
}
