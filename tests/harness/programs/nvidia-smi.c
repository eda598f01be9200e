/* Replacement for nvidia-smi: lists the GPUs that harness/nvidia_runtime.py has put into the container, by the variable
 * FAKE_GPUS ("UUID=MODEL;UUID=MODEL"). With -L the output has the form of the real program's. A command that is started
 * in the container later lacks the variable, so this program then reads it from the container's first process. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *of_first_process(const char *variable) {
    static char environment[65536];
    size_t length = strlen(variable), size;
    FILE *file = fopen("/proc/1/environ", "r");
    if (file == NULL)
        return NULL;
    size = fread(environment, 1, sizeof environment - 1, file);
    fclose(file);
    for (char *at = environment; at < environment + size; at += strlen(at) + 1)
        if (strncmp(at, variable, length) == 0 && at[length] == '=')
            return at + length + 1;
    return NULL;
}

int main(int count, char **arguments) {
    const char *given = getenv("FAKE_GPUS");
    if (given == NULL)
        given = of_first_process("FAKE_GPUS");
    char *list = strdup(given == NULL ? "" : given), *rest = list, *entry;
    int index = 0;
    if (list == NULL)
        return 1;
    if (count > 2 || (count == 2 && strcmp(arguments[1], "-L") != 0)) {
        fprintf(stderr, "this nvidia-smi stands in for NVIDIA's in a test; it knows only -L\n");
        return 2;
    }
    while ((entry = strsep(&rest, ";")) != NULL) {
        char *model = strchr(entry, '=');
        if (model == NULL)
            continue;
        *model++ = '\0';
        printf("GPU %d: %s (UUID: %s)\n", index++, model, entry);
    }
    free(list);
    if (index == 0) {
        printf("No devices were found\n");
        return 6;
    }
    return 0;
}
