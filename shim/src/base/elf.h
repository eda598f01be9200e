/* The objects that the dynamic linker has loaded, read from their own tables: the hook looks symbols up without dlsym.
 */
#ifndef SHAREPOD_OBJECTS_H
#define SHAREPOD_OBJECTS_H

#include <elf.h>
#include <link.h>
#include <stdbool.h>
#include <stdint.h>

struct object {
    ElfW(Addr) base;
    const ElfW(Sym) * symbols;
    const char *strings;
    const uint32_t *gnu_hash, *hash; /* either may be NULL */
};

/* The first loaded object whose file name begins with `prefix`. */
bool object_find(const char *prefix, struct object *object);
/* The address of a symbol that the object defines, of whatever version; NULL if it has none. */
void *object_symbol(const struct object *object, const char *name);
/* A symbol of the C library, wherever this release keeps it (libc, libpthread, libdl); NULL if it is not loaded. */
void *object_libc_symbol(const char *name);
/* Keeps the first loaded object whose file name begins with `prefix` loaded for good, whoever closes it. */
void object_pin(const char *prefix);
/* The same symbol of the next object that defines it behind this one, as RTLD_NEXT would find it; of the C library, if
 * none does. Other copies of the hook don't count. */
void *object_next_symbol(const char *name);
/* Whether the object that holds the address was loaded before the one that holds the other. */
bool object_precedes(const void *address, const void *other);
/* Whether the address lies in a loaded object whose file name begins with `prefix`. */
bool object_holds(const void *address, const char *prefix);
/* The directory that this very object was loaded from, with a final slash; false if it is longer than `size`. */
bool object_own_directory(char *directory, size_t size);

#endif
