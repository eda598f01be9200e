/* NOCUDA: a program that uses neither CUDA nor threads nor dlsym. Prints the state of its process as one JSON object.
 */
#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int entries(const char *path) {
    int count = 0;
    DIR *folder = opendir(path);
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;)
        count += entry->d_name[0] != '.';
    closedir(folder);
    return count;
}

int main(void) {
    char line[4096];
    int libcuda = 0, hook = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps) != NULL) {
        libcuda |= strstr(line, "libcuda") != NULL;
        hook |= strstr(line, "libsharepod") != NULL;
    }
    fclose(maps);
    printf("{\"threads\": %d, \"files\": %d, \"libcuda\": %d, \"hook\": %d}\n", entries("/proc/self/task"),
           entries("/proc/self/fd") - 1, libcuda, hook);
    return 0;
}
