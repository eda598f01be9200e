/* Functions that lead the hook back to the C library, which it otherwise passes by, for sanitizers. Linked with --wrap.
 *
 * object_libc_symbol: what it takes from there has to be what the sanitizer put in its place (pthread_create above
 * all), or its thread would be one that the sanitizer has never seen. sys_map, sys_unmap: memory that comes back under
 * the address of what has gone is not the same memory, which the sanitizer sees by mmap and munmap alone.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <sys/mman.h>

void *__wrap_object_libc_symbol(const char *name);
void *__wrap_sys_map(size_t bytes);
void __wrap_sys_unmap(void *memory, size_t bytes);

void *__wrap_object_libc_symbol(const char *name) {
    return dlsym(RTLD_DEFAULT, name);
}

void *__wrap_sys_map(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return NULL;
    madvise(memory, bytes, MADV_WIPEONFORK);
    return memory;
}

void __wrap_sys_unmap(void *memory, size_t bytes) {
    if (memory != NULL)
        munmap(memory, bytes);
}
