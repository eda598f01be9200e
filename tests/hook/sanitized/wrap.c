/* The hook's way past the dynamic linker's own lookup, for a build under sanitizers: what it takes from the C library
 * has to be what the sanitizer put in its place (pthread_create above all), or its thread would be one that the
 * sanitizer has never seen. Linked with --wrap=object_libc_symbol. */
#include <dlfcn.h>

void *__wrap_object_libc_symbol(const char *name);

void *__wrap_object_libc_symbol(const char *name) {
    return dlsym(RTLD_DEFAULT, name);
}
