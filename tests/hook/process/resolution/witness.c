/* A library that is preloaded before the hook and wraps dlsym itself, like a tracer. It logs each function that the
 * hook's cuGetProcAddress returns, one per line: name, version, flags, result, file and symbol. WITNESS_LOG is the name
 * of the log. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int get_v1(const char *, void **, int, unsigned long long);
typedef int get_v2(const char *, void **, int, unsigned long long, int *);

static get_v1 *next_v1;
static get_v2 *next_v2;

static void note(const char *name, int version, unsigned long long flags, int result, void *function) {
    Dl_info where = {0};
    FILE *log = fopen(getenv("WITNESS_LOG"), "a");
    if (function != NULL)
        dladdr(function, &where);
    if (log == NULL)
        exit(3);
    fprintf(log, "%s %d %llu %d %s %s\n", name, version, flags, result, where.dli_fname ? where.dli_fname : "-",
            where.dli_sname ? where.dli_sname : "-");
    fclose(log);
}

static get_v1 witness_v1;
static get_v2 witness_v2;

/* Replace a looked-up cuGetProcAddress by the logging version, for programs that look it up themselves. */
static void replace(void **function) {
    Dl_info where = {0};
    if (function == NULL || *function == NULL || dladdr(*function, &where) == 0 || where.dli_sname == NULL)
        return;
    if (strcmp(where.dli_sname, "cuGetProcAddress") == 0) {
        next_v1 = (get_v1 *)*function;
        *function = (void *)witness_v1;
    } else if (strcmp(where.dli_sname, "cuGetProcAddress_v2") == 0) {
        next_v2 = (get_v2 *)*function;
        *function = (void *)witness_v2;
    }
}

static int witness_v1(const char *name, void **function, int version, unsigned long long flags) {
    int result = next_v1(name, function, version, flags);
    note(name, version, flags, result, function ? *function : NULL);
    replace(function);
    return result;
}

static int witness_v2(const char *name, void **function, int version, unsigned long long flags, int *status) {
    int result = next_v2(name, function, version, flags, status);
    note(name, version, flags, result, function ? *function : NULL);
    replace(function);
    return result;
}

void *dlsym(void *handle, const char *symbol) {
    static void *(*next)(void *, const char *);
    if (next == NULL)
        next = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", NEXT_VERSION);
    void *found = next(handle, symbol);
    if (strncmp(symbol, "cuGetProcAddress", strlen("cuGetProcAddress")) == 0)
        replace(&found);
    return found;
}
