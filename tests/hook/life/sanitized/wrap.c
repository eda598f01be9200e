/* Replacements (linker option --wrap) of functions by which the hook bypasses the C library, for a build with
 * sanitizers.
 *
 * - object_libc_symbol returns the sanitizer's function if the sanitizer replaces that of the C library. Without the
 *   sanitizer's pthread_create, the sanitizer would not know the hook thread.
 * - sys_map and sys_unmap call mmap and munmap. Only from them does the sanitizer learn that memory at a reused address
 *   is new memory.
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
