/* runtime LIBCUDART: opens NVIDIA's runtime and makes a call for which the runtime looks up the driver. */
#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char **argv) {
    void *runtime = argc == 2 ? dlopen(argv[1], RTLD_NOW) : NULL;
    int (*count)(int *) = runtime ? (int (*)(int *))dlsym(runtime, "cudaGetDeviceCount") : NULL;
    int devices = -1;
    if (count == NULL) {
        fprintf(stderr, "runtime LIBCUDART: %s\n", dlerror());
        return 2;
    }
    printf("%d\n", count(&devices));
    return 0;
}
