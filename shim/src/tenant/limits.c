/* Parser of the file `limits`; protocol.h describes the format. The first CUDA call of a program may come from a thread
 * with a small stack, so the text is read into mapped memory. */
#include "tenant/limits.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

#include "base/sys.h"

static bool take(const char **at, const char *word) {
    size_t length = strlen(word);
    if (strncmp(*at, word, length) != 0)
        return false;
    *at += length;
    return true;
}

static bool take_number(const char **at, uint64_t most, uint64_t *number) {
    *number = 0;
    if (**at < '0' || **at > '9')
        return false;
    for (; **at >= '0' && **at <= '9'; (*at)++) {
        if (*number > (UINT64_MAX - 9) / 10)
            return false;
        *number = *number * 10 + (uint64_t)(**at - '0');
    }
    return *number <= most;
}

static int hex_digit(char c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

bool limits_take_uuid(const char **at, uint8_t *uuid) {
    if (!take(at, "GPU-"))
        return false;
    for (int byte = 0; byte < SHP_UUID_BYTES; byte++) {
        if ((byte == 4 || byte == 6 || byte == 8 || byte == 10) && !take(at, "-"))
            return false;
        int high = hex_digit((*at)[0]), low = high < 0 ? -1 : hex_digit((*at)[1]);
        if (low < 0)
            return false;
        uuid[byte] = (uint8_t)(high * 16 + low);
        *at += 2;
    }
    return true;
}

static bool parse_gpu(const char *at, struct shp_gpu *gpu) {
    uint64_t request, limit, memory, enforced, context = 0;
    if (!limits_take_uuid(&at, gpu->uuid) || !take(&at, " request ") || !take_number(&at, 1000, &request) ||
        !take(&at, " limit ") || !take_number(&at, 1000, &limit) || !take(&at, " memory ") ||
        !take_number(&at, INT64_MAX, &memory) || !take(&at, " enforced ") || !take_number(&at, 1, &enforced))
        return false;
    gpu->request_milli = (uint32_t)request;
    gpu->limit_milli = (uint32_t)limit;
    gpu->memory = memory;
    gpu->flags = enforced ? SHP_GPU_MEMORY_ENFORCED : 0;
    if (take(&at, " context ") && !take_number(&at, UINT32_MAX, &context))
        return false;
    gpu->context_kib = (uint32_t)context;
    return *at == '\n' || *at == '\0';
}

bool limits_parse(const char *text, struct limits *limits) {
    memset(limits, 0, sizeof *limits);
    for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
        line += line != text; /* skip the newline at the end of the last line */
        const char *at = line;
        if (take(&at, "gpu ") && limits->count < SHP_MAX_GPUS && parse_gpu(at, &limits->gpus[limits->count]))
            limits->count++;
    }
    return limits->count > 0;
}

/* Return the tenant's phase, a hash of its directory's inode: the same in all its processes. The inode of the file
 * itself would change with every update. */
static uint64_t phase_of(const char *directory) {
    struct statx facts;
    memset(&facts, 0, sizeof facts);
    if (sys_call(SYS_statx, AT_FDCWD, (long)directory, 0, STATX_INO, (long)&facts, 0) != 0)
        return 0;
    return (facts.stx_ino * 0x9e3779b97f4a7c15ull) >> 37; /* up to 134 ms */
}

static long open_in(const char *directory, const char *name) {
    char path[512];
    size_t length = strlen(directory), more = strlen(name) + 1;
    if (length + more > sizeof path)
        return -ENAMETOOLONG;
    memcpy(path, directory, length);
    memcpy(path + length, name, more);
    return sys_call(SYS_openat, AT_FDCWD, (long)path, O_RDONLY | O_CLOEXEC, 0, 0, 0);
}

bool limits_fail_open(const char *directory) {
    long file = open_in(directory, "fail-open");
    if (file >= 0)
        sys_close((int)file);
    return file >= 0;
}

bool limits_read(const char *directory, struct limits *limits) {
    enum { ROOM = 8192 };
    long file = open_in(directory, "limits");
    if (file < 0)
        return false;
    char *text = sys_map(ROOM);
    for (size_t filled = 0; text != NULL && filled < ROOM - 1;) {
        long got = sys_call(SYS_read, file, (long)(text + filled), (long)(ROOM - 1 - filled), 0, 0, 0);
        if (got <= 0 && got != -EINTR)
            break;
        filled += got > 0 ? (size_t)got : 0;
    }
    sys_close((int)file);
    bool parsed = text != NULL && limits_parse(text, limits);
    sys_unmap(text, ROOM);
    limits->phase = phase_of(directory);
    return parsed;
}
