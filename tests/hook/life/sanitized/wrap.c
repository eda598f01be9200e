/* Replacements, by --wrap, of functions with which the hook passes the C library by, for a build under sanitizers.
 *
 * - object_libc_symbol returns the sanitizer's function where there is one in place of the C library's. Without its
 *   pthread_create the sanitizer would not know the hook's thread.
 * - sys_map and sys_unmap call mmap and munmap, by which alone the sanitizer learns that memory at an address that
 *   returns is not the memory that was there before.
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
