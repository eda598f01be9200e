/* Symbol lookup in loaded objects (ELF), from their own symbol tables. The hook cannot use dlsym for that, because it
 * replaces dlsym.
 *
 * Guarantees:
 * - A lookup calls no function of the program or of another library. Exception: object_pin calls dlopen.
 * - A result is valid while its object stays loaded.
 * - With glibc, no lock is taken to find an object that was loaded at the program's start, or a symbol in such an
 *   object.
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
    const uint32_t *gnu_hash, *hash; /* one of the two may be NULL */
    const char *path;                /* path in the dynamic linker's list */
    unsigned long long unloads; /* number of objects that the process had unloaded by then. While it is the same, the
                                   object at `base` is still this one */
};

/* Find the first loaded object whose file name begins with `prefix`. Return false if no such object is loaded. */
bool object_find(const char *prefix, struct object *object);
/* Return the address of a symbol, of any version, that the object defines; NULL: it does not define the symbol. */
void *object_symbol(const struct object *object, const char *name);
/* Return the address of a symbol of the C library, in libc, libpthread or libdl; NULL: none of them defines it. */
void *object_libc_symbol(const char *name);
/* Keep the object with this path loaded until the process ends, even if the program calls dlclose. */
void object_pin(const char *path);
/* Return the address of a symbol as dlsym(RTLD_NEXT) would: from the first object after the hook that defines it. Other
 * copies of the hook are skipped. If no such object defines it, return the C library's. */
void *object_next_symbol(const char *name);
/* Return true if an object before the hook in the dynamic linker's search order defines the symbol. */
bool object_defined_before(const char *name);
/* Return true if the object that contains `address` precedes the object that contains `other` in the search order. */
bool object_precedes(const void *address, const void *other);
/* Find the loaded object that contains the address. Return false if there is none, or if its file name does not begin
 * with `prefix`. */
bool object_holding(const void *address, const char *prefix, struct object *object);
/* Store the directory from which the hook was loaded, with a final slash. Return false if it needs more than `size`
 * bytes. */
bool object_own_directory(char *directory, size_t size);

#endif
