/* ask: reads requests from standard input, one per line, and answers each with the file and symbol that the lookup
 * returned.
 *
 *   proc1 NAME VERSION FLAGS      cuGetProcAddress          answer: RESULT - FILE SYMBOL
 *   proc2 NAME VERSION FLAGS      cuGetProcAddress_v2       answer: RESULT STATUS FILE SYMBOL
 *   handle|default|next NAME      dlsym                     answer: FILE SYMBOL
 *   vhandle|vdefault|vnext NAME   dlvsym of version NONE    answer: FILE SYMBOL
 *
 * The NAME "" is the empty string. "load PATH" opens a libcuda, in which later requests search. "init -" answers with
 * the result of its cuInit. "close -" closes it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static void *driver;

static void print_address(void *function) {
    Dl_info where = {0};
    if (function != NULL)
        dladdr(function, &where);
    printf("%s %s\n", where.dli_fname ? where.dli_fname : "-", where.dli_sname ? where.dli_sname : "-");
}

int main(void) {
    char line[512], what[16], name[256];
    while (fgets(line, sizeof line, stdin) != NULL) {
        int version = 0, status = -1;
        unsigned long long flags = 0;
        void *function = NULL;
        if (sscanf(line, "%15s %255s %d %llu", what, name, &version, &flags) < 2)
            return 2;
        if (strcmp(name, "\"\"") == 0)
            name[0] = '\0';
        void *handle = strstr(what, "handle") ? driver : strstr(what, "next") ? RTLD_NEXT : RTLD_DEFAULT;
        if (strcmp(what, "load") == 0) {
            driver = dlopen(name, RTLD_NOW);
            print_address(driver ? dlsym(driver, "cuDriverGetVersion") : NULL);
        } else if (strcmp(what, "init") == 0) {
            int (*init)(unsigned) = dlsym(driver, "cuInit");
            printf("- %d\n", init(0));
        } else if (strcmp(what, "close") == 0) {
            printf("- %d\n", dlclose(driver));
        } else if (strcmp(what, "proc1") == 0) {
            int (*get)(const char *, void **, int, unsigned long long) = dlsym(driver, "cuGetProcAddress");
            printf("%d - ", get(name, &function, version, flags));
            print_address(function);
        } else if (strcmp(what, "proc2") == 0) {
            int (*get)(const char *, void **, int, unsigned long long, int *) = dlsym(driver, "cuGetProcAddress_v2");
            int result = get(name, &function, version, flags, &status);
            printf("%d %d ", result, status);
            print_address(function);
        } else if (what[0] == 'v') {
            print_address(dlvsym(handle, name, "NONE"));
        } else {
            print_address(dlsym(handle, name));
        }
        fflush(stdout);
    }
    return 0;
}
