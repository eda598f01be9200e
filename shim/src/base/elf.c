/* Searches symbols in the hash tables of loaded objects (DT_GNU_HASH, else DT_HASH). Objects are searched in the order
 * of the dynamic linker. Objects that were loaded at the program's start are found in glibc's list of loaded objects,
 * without a lock. All others are found by the C library's dl_iterate_phdr, which takes a lock. */
#include "base/elf.h"

#include <stdatomic.h>
#include <string.h>

#define HOOK_FILE "libsharepod" /* beginning of the file name of each copy of the hook */

struct search {
    const char *prefix;
    struct object *object;
    const void *inside; /* any address inside the searched object, or NULL */
    char *path;
    size_t size;
};

static const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* glibc relocates these addresses in place; musl does not, and the vDSO's addresses are not relocated either. */
static const void *at(ElfW(Addr) base, ElfW(Addr) value) {
    return (const void *)(value < base ? value + base : value);
}

static bool read_dynamic(ElfW(Addr) base, const ElfW(Dyn) * entry, struct object *object) {
    *object = (struct object){.base = base};
    for (; entry != NULL && entry->d_tag != DT_NULL; entry++)
        switch (entry->d_tag) {
        case DT_SYMTAB: object->symbols = at(base, entry->d_un.d_ptr); break;
        case DT_STRTAB: object->strings = at(base, entry->d_un.d_ptr); break;
        case DT_GNU_HASH: object->gnu_hash = at(base, entry->d_un.d_ptr); break;
        case DT_HASH: object->hash = at(base, entry->d_un.d_ptr); break;
        }
    return object->symbols && object->strings && (object->gnu_hash || object->hash);
}

static bool read_tables(const struct dl_phdr_info *info, struct object *object) {
    const ElfW(Dyn) *dynamic = NULL;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
            dynamic = (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    bool read = read_dynamic(info->dlpi_addr, dynamic, object);
    object->path = info->dlpi_name;
    object->unloads = info->dlpi_subs;
    return read;
}

/* The list of loaded objects that glibc keeps for debuggers, and the hook's dynamic section, by which the hook finds
 * itself in the list. */
extern struct r_debug _r_debug __attribute__((weak));
extern ElfW(Dyn) _DYNAMIC[] __attribute__((visibility("hidden")));

/* Return the first object of the list; NULL: the C library is not glibc, and keeps no list. */
static const struct link_map *first_object(void) {
    return &_r_debug != NULL ? _r_debug.r_map : NULL;
}

/* Return the last object of the list that was certainly loaded at the program's start: glibc or its dynamic linker. Up
 * to this object the list can be read without a lock, because these objects are never unloaded. dl_iterate_phdr takes a
 * lock that may never be released in a child of fork (H6, process.h). */
static const struct link_map *last_initial(void) {
    static const struct link_map *_Atomic known;
    const struct link_map *last = atomic_load_explicit(&known, memory_order_relaxed);
    unsigned seen = 0;
    for (const struct link_map *map = first_object(); last == NULL && map != NULL; map = map->l_next) {
        seen |= strcmp(base_name(map->l_name), "libc.so.6") == 0      ? 1
                : strncmp(base_name(map->l_name), "ld-linux", 8) == 0 ? 2
                                                                      : 0;
        if (seen == 3)
            last = map;
    }
    atomic_store_explicit(&known, last, memory_order_relaxed);
    return last;
}

/* Return the first object up to last_initial() whose file name begins with `prefix`. If `prefix` is NULL, return the
 * object with the dynamic section `dynamic`. Return NULL if there is none. */
static const struct link_map *find_initial(const char *prefix, const ElfW(Dyn) * dynamic) {
    const struct link_map *last = last_initial(), *map = last != NULL ? first_object() : NULL;
    for (; map != NULL; map = map == last ? NULL : map->l_next)
        if (prefix != NULL ? strncmp(base_name(map->l_name), prefix, strlen(prefix)) == 0 : map->l_ld == dynamic)
            return map;
    return NULL;
}

typedef int visitor(struct dl_phdr_info *info, size_t size, void *of);

/* Return glibc's dl_iterate_phdr. With another C library, return the function that the dynamic linker finds, which may
 * belong to the program. */
static int (*choose_iterator(void))(visitor *, void *) {
    struct object libc;
    const struct link_map *map = find_initial("libc.so.6", NULL);
    void *own = NULL;
    if (map != NULL && read_dynamic(map->l_addr, map->l_ld, &libc))
        own = object_symbol(&libc, "dl_iterate_phdr");
    return own != NULL ? (int (*)(visitor *, void *))own : dl_iterate_phdr;
}

/* Call `visit` for each loaded object until it returns a value other than 0. Return that value, or 0. */
static int visit_objects(visitor *visit, void *of) {
    static int (*_Atomic chosen)(visitor *, void *);
    /* The pointer is copied first: a call through an _Atomic pointer would read it non-atomically, a data race.
     */
    int (*iterate)(visitor *, void *) = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (iterate == NULL) {
        iterate = choose_iterator();
        atomic_store_explicit(&chosen, iterate, memory_order_relaxed);
    }
    return iterate(visit, of);
}

static bool is_named(const struct dl_phdr_info *info, const char *prefix) {
    return info->dlpi_name != NULL && strncmp(base_name(info->dlpi_name), prefix, strlen(prefix)) == 0;
}

static int visit_by_name(struct dl_phdr_info *info, size_t size, void *argument) {
    struct search *search = argument;
    (void)size;
    return is_named(info, search->prefix) ? read_tables(info, search->object) : 0;
}

bool object_find(const char *prefix, struct object *object) {
    struct search search = {.prefix = prefix, .object = object};
    const struct link_map *map = find_initial(prefix, NULL);
    if (map == NULL || !read_dynamic(map->l_addr, map->l_ld, object))
        return visit_objects(visit_by_name, &search) != 0;
    object->path = map->l_name;
    return true;
}

static bool covers(const struct dl_phdr_info *info, const void *address) {
    for (int i = 0; i < info->dlpi_phnum; i++) {
        ElfW(Addr) start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
        if (info->dlpi_phdr[i].p_type == PT_LOAD && (ElfW(Addr))address - start < info->dlpi_phdr[i].p_memsz)
            return true;
    }
    return false;
}

/* Copy the directory part of a path, with its final slash. Return false if the path has none, or it does not fit. */
static bool copy_directory(const char *path, char *directory, size_t size) {
    size_t length = (size_t)(base_name(path) - path);
    if (length == 0 || length >= size)
        return false;
    memcpy(directory, path, length);
    directory[length] = '\0';
    return true;
}

static int visit_by_address(struct dl_phdr_info *info, size_t size, void *argument) {
    struct search *search = argument;
    (void)size;
    if (!covers(info, search->inside))
        return 0;
    return copy_directory(info->dlpi_name, search->path, search->size) ? 1 : -1;
}

void object_pin(const char *path) {
    enum { LAZY = 1, NOLOAD = 4, NODELETE = 0x1000 }; /* the RTLD_ flags of glibc and musl */
    void *(*open)(const char *, int) = (void *(*)(const char *, int))object_libc_symbol("dlopen");
    if (open != NULL)
        open(path, LAZY | NOLOAD | NODELETE);
}

static int visit_holder(struct dl_phdr_info *info, size_t size, void *argument) {
    const struct search *search = argument;
    (void)size;
    if (info->dlpi_name == NULL || !covers(info, search->inside))
        return 0;
    return is_named(info, search->prefix) && read_tables(info, search->object) ? 1 : -1;
}

bool object_holding(const void *address, const char *prefix, struct object *object) {
    struct search search = {.inside = address, .prefix = prefix, .object = object};
    return address != NULL && visit_objects(visit_holder, &search) == 1;
}

bool object_own_directory(char *directory, size_t size) {
    struct search search = {.inside = (const void *)object_own_directory, .path = directory, .size = size};
    const struct link_map *map = find_initial(NULL, _DYNAMIC);
    if (map == NULL)
        return visit_objects(visit_by_address, &search) == 1;
    return copy_directory(map->l_name, directory, size);
}

static void *defined(const struct object *object, uint32_t index, const char *name) {
    const ElfW(Sym) *symbol = &object->symbols[index];
    if (symbol->st_shndx == SHN_UNDEF || symbol->st_value == 0 || strcmp(object->strings + symbol->st_name, name) != 0)
        return NULL;
    unsigned type = ELF64_ST_TYPE(symbol->st_info);
    return type == STT_FUNC || type == STT_NOTYPE || type == STT_OBJECT ? (void *)(object->base + symbol->st_value)
                                                                        : NULL;
}

static void *find_gnu(const struct object *object, const char *name) {
    uint32_t hash = 5381;
    for (const unsigned char *c = (const unsigned char *)name; *c != '\0'; c++)
        hash = hash * 33 + *c;
    uint32_t bucket_count = object->gnu_hash[0], first = object->gnu_hash[1], bloom_words = object->gnu_hash[2];
    if (bucket_count == 0)
        return NULL;
    const uint32_t *buckets = object->gnu_hash + 4 + bloom_words * (sizeof(ElfW(Addr)) / 4);
    const uint32_t *chain = buckets + bucket_count;
    for (uint32_t index = buckets[hash % bucket_count]; index >= first; index++) {
        uint32_t entry = chain[index - first];
        void *found = (entry | 1) == (hash | 1) ? defined(object, index, name) : NULL;
        if (found != NULL)
            return found;
        if (entry & 1)
            break;
    }
    return NULL;
}

static void *find_sysv(const struct object *object, const char *name) {
    uint32_t hash = 0;
    for (const unsigned char *c = (const unsigned char *)name; *c != '\0'; c++) {
        hash = (hash << 4) + *c;
        hash = (hash ^ ((hash & 0xf0000000u) >> 24)) & 0x0fffffffu;
    }
    const uint32_t *buckets = object->hash + 2, *chain = buckets + object->hash[0];
    if (object->hash[0] == 0)
        return NULL;
    for (uint32_t index = buckets[hash % object->hash[0]]; index != 0; index = chain[index]) {
        void *found = defined(object, index, name);
        if (found != NULL)
            return found;
    }
    return NULL;
}

void *object_symbol(const struct object *object, const char *name) {
    return object->gnu_hash ? find_gnu(object, name) : find_sysv(object, name);
}

struct next {
    const char *name;
    bool passed; /* the search has passed the hook's own object */
    void *found;
};

static int visit_behind(struct dl_phdr_info *info, size_t size, void *argument) {
    struct next *next = argument;
    struct object object;
    (void)size;
    if (covers(info, (const void *)object_next_symbol)) {
        next->passed = true;
        return 0;
    }
    if (!next->passed || info->dlpi_name == NULL || !read_tables(info, &object) ||
        strncmp(base_name(info->dlpi_name), HOOK_FILE, strlen(HOOK_FILE)) == 0)
        return 0;
    next->found = object_symbol(&object, next->name);
    return next->found != NULL;
}

void *object_next_symbol(const char *name) {
    struct next next = {.name = name};
    visit_objects(visit_behind, &next);
    return next.found != NULL ? next.found : object_libc_symbol(name);
}

static int visit_before(struct dl_phdr_info *info, size_t size, void *argument) {
    struct object object;
    (void)size;
    if (covers(info, (const void *)object_defined_before))
        return -1;
    return read_tables(info, &object) && object_symbol(&object, argument) != NULL ? 1 : 0;
}

bool object_defined_before(const char *name) {
    return visit_objects(visit_before, (void *)name) == 1;
}

struct order {
    const void *address, *other;
};

static int visit_either(struct dl_phdr_info *info, size_t size, void *argument) {
    const struct order *order = argument;
    (void)size;
    return covers(info, order->other) ? -1 : covers(info, order->address) ? 1 : 0;
}

bool object_precedes(const void *address, const void *other) {
    struct order order = {address, other};
    return visit_objects(visit_either, &order) == 1;
}

void *object_libc_symbol(const char *name) {
    static const char libraries[][16] = {"libc.so.6",  "libpthread.so.0", "libdl.so.2",
                                         "libc.musl-", "ld-musl-",        "libc.so"};
    for (unsigned i = 0; i < sizeof libraries / sizeof *libraries; i++) {
        struct object object;
        void *found = object_find(libraries[i], &object) ? object_symbol(&object, name) : NULL;
        if (found != NULL)
            return found;
    }
    return NULL;
}
