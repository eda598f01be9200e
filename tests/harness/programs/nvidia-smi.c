/* Stands in for nvidia-smi: lists the GPUs that the test's container runtime put into the container (see
 * harness/nvidia_runtime.py, which says so in FAKE_GPUS: "UUID=MODEL;UUID=MODEL"). With -L in the words of the real
 * one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int count, char **arguments) {
    const char *given = getenv("FAKE_GPUS");
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
