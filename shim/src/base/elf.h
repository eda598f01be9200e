/* Loaded objects (ELF), read from their own tables: the hook looks symbols up without dlsym, which it interposes.
 *
 * Guarantees:
 * - No lookup calls a function of the program or of another library, except object_pin, which calls dlopen.
 * - The answer holds while the object stays loaded.
 * - Finding an object that was loaded at the program's start, and a symbol in it, takes no lock (with glibc).
 */
#ifndef SHAREPOD_ELF_H
#define SHAREPOD_ELF_H

#include <elf.h>
#include <link.h>
#include <stdbool.h>
#include <stdint.h>

/* A loaded object. */
struct object {
    ElfW(Addr) base;
    const ElfW(Sym) * symbols;
    const char *strings;
    const uint32_t *gnu_hash, *hash; /* one of them may be NULL */
    const char *path;                /* as the dynamic linker has it */
    unsigned long long unloads;      /* objects unloaded so far: while it is the same, `base` is of one object */
};

/* Find the first loaded object whose file name begins with `prefix`. False: none is loaded. */
bool object_find(const char *prefix, struct object *object);
/* Return the address of a symbol that the object defines, of any version; NULL: it defines none. */
void *object_symbol(const struct object *object, const char *name);
/* Return a symbol of the C library, wherever this release keeps it (libc, libpthread, libdl); NULL: it is not loaded.
 */
void *object_libc_symbol(const char *name);
/* Keep the object of that path loaded until the process ends, also after each dlclose. */
void object_pin(const char *path);
/* Return the symbol of the next object behind the hook that defines it, as RTLD_NEXT would; of the C library if none
 * does. Other copies of the hook do not count. */
void *object_next_symbol(const char *name);
/* Return whether an object in front of the hook defines the symbol. */
bool object_defined_before(const char *name);
/* Return whether the object that holds `address` was loaded before the one that holds `other`. */
bool object_precedes(const void *address, const void *other);
/* Find the loaded object that holds the address. False: its file name does not begin with `prefix`, or there is none.
 */
bool object_holding(const void *address, const char *prefix, struct object *object);
/* Store the directory that the hook itself was loaded from, with a final slash. False: it is longer than `size` bytes.
 */
bool object_own_directory(char *directory, size_t size);

#endif
