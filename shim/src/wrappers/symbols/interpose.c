/* The hook's dlsym and dlvsym. If they find a function in libcuda or NVML, they return the hook's wrapper instead.
 *
 * Other lookups end in a jump to the next dlsym or dlvsym: the C library's, or that of another library preloaded behind
 * the hook. The caller's return address is unchanged, because with RTLD_NEXT the C library searches from that address.
 * After a call from the hook, it would search behind the hook instead of behind the caller.
 */
#include <dlfcn.h>
#include <string.h>

#include "driver/entries.h"
#include "wrappers/memory/nvml.h"
#include "base/elf.h"
#include "base/sys.h"
#include "wrappers/symbols/resolve.h"

/* Decision of the C code about one call, which the assembler code carries out: return `answer`, or, if `decided` is 0,
 * jump to the real function. */
struct verdict {
    void *answer;
    long decided;
};

/* One call of dlsym or dlvsym. */
struct lookup {
    void *handle;
    const char *symbol, *version; /* `version` only in dlvsym */
    const void *caller;
    void *real; /* the next dlsym or dlvsym in the search order; NULL: there is none */
    bool versioned;
};

__attribute__((visibility("hidden"), used)) void *interpose_real_dlsym, *interpose_real_dlvsym;

static const struct verdict undecided;

/* Return the real function's result for this symbol. */
static void *ask(const struct lookup *lookup, const char *symbol) {
    return lookup->versioned
               ? ((void *(*)(void *, const char *, const char *))lookup->real)(lookup->handle, symbol, lookup->version)
               : ((void *(*)(void *, const char *))lookup->real)(lookup->handle, symbol);
}

/* Decide for NULL. A lookup of a name that cannot exist makes the real function set an error for dlerror, because
 * programs print dlerror() without a check.
 */
static struct verdict refuse(const struct lookup *lookup) {
    ask(lookup, "(a function of libcuda that is not to be had)");
    return (struct verdict){NULL, true};
}

/* Decide while no libcuda is loaded. If the lookup would find the hook's wrapper, the result is NULL, because the
 * wrapper has no driver to call. Otherwise it is the same as without the hook. */
static struct verdict without_driver(const struct lookup *lookup, enum entry entry) {
    bool own;
    if (lookup->handle == NULL)
        own = !object_defined_before(lookup->symbol);
    else if (lookup->handle == (void *)-1l)
        own = object_precedes(lookup->caller, (const void *)ask);
    else
        own = ask(lookup, lookup->symbol) == wrapper_of(entry);
    return own ? refuse(lookup) : undecided;
}

/* Decide for RTLD_DEFAULT and RTLD_NEXT, which search the loaded objects in order. The real lookup usually finds the
 * hook's wrapper in that order, or a function of a library that is preloaded before the hook. The hook decides only if
 * the lookup would find the driver's own function, because libcuda precedes the hook or the search begins behind the
 * hook. */
static struct verdict by_order(const struct lookup *lookup, enum entry entry) {
    const void *hook = (const void *)by_order;
    bool next = lookup->handle == (void *)-1l;
    if (entries_driver[entry] == NULL)
        return refuse(lookup);
    if (object_precedes(entries_driver[entry], hook) || (next && !object_precedes(lookup->caller, hook)))
        return (struct verdict){wrapper_of(entry), true};
    return undecided;
}

/* Decide for an NVML function that the hook wraps. If the lookup finds a function of another library, that one is
 * returned. */
static struct verdict decide_nvml(const struct lookup *lookup, void *wrapper) {
    const void *hook = (const void *)by_order;
    bool next = lookup->handle == (void *)-1l;
    void *theirs = nvml_real(lookup->symbol);
    if (lookup->handle == NULL || next) {
        if (theirs == NULL)
            return refuse(lookup);
        if (object_precedes(theirs, hook) || (next && !object_precedes(lookup->caller, hook)))
            return (struct verdict){wrapper, true};
        return undecided;
    }
    void *found = ask(lookup, lookup->symbol);
    return (struct verdict){found != NULL && found == theirs ? wrapper : found, true};
}

/* Decide for the symbols "dlsym" and "dlvsym" with a handle. If the lookup finds the C library's function, return the
 * hook's. Exception: a library behind the hook also defines the symbol, and needs the C library's function. */
static struct verdict decide_own(const struct lookup *lookup, void *own) {
    void *found = ask(lookup, lookup->symbol), *libc = object_libc_symbol(lookup->symbol);
    bool last = object_next_symbol(lookup->symbol) == libc;
    return (struct verdict){last && found != NULL && found == libc ? own : found, true};
}

/* Return the hook's dlsym or dlvsym for this symbol; NULL: the symbol is neither. */
static void *own_lookup(const char *symbol) {
    if (symbol == NULL || symbol[0] != 'd' || symbol[1] != 'l')
        return NULL;
    return strcmp(symbol, "dlsym") == 0 ? (void *)dlsym : strcmp(symbol, "dlvsym") == 0 ? (void *)dlvsym : NULL;
}

/* Decide a lookup. */
static struct verdict decide(const struct lookup *lookup) {
    if (lookup->real == NULL)
        return (struct verdict){NULL, true};
    void *own = own_lookup(lookup->symbol);
    if (own != NULL && lookup->handle != NULL && lookup->handle != (void *)-1l)
        return decide_own(lookup, own);
    void *in_place_of_nvml = nvml_wrapper(lookup->symbol);
    if (in_place_of_nvml != NULL)
        return decide_nvml(lookup, in_place_of_nvml);
    enum entry entry = entries_exported(lookup->symbol);
    if (entry == ENTRY_COUNT)
        return undecided;
    if (!entries_reload())
        return without_driver(lookup, entry);
    if (lookup->handle == NULL || lookup->handle == (void *)-1l) /* RTLD_DEFAULT, RTLD_NEXT */
        return by_order(lookup, entry);
    /* Use the C library's dlsym: that of a library behind the hook might return its own function instead of the
     * driver's. */
    struct lookup driver = *lookup;
    void *libc = object_libc_symbol(lookup->versioned ? "dlvsym" : "dlsym");
    driver.real = libc != NULL ? libc : lookup->real;
    void *found = ask(&driver, lookup->symbol);
    struct object second;
    entries_follow(found);
    if (found != NULL && found == entries_driver[entry])
        return (struct verdict){wrapper_of(entry), true};
    if (!entries_must_pass(entry) || !object_holding(found, DRIVER_FILE, &second))
        return (struct verdict){found, true};
    if (entries_first_refusal(entry))
        sys_say(lookup->symbol, " of a second libcuda is not handed out: only one driver at a time is gated", NULL);
    return refuse(lookup);
}

/* Return the next dlsym or dlvsym, which is looked up only once. */
static void *real(void **known, const char *name) {
    void *found = __atomic_load_n(known, __ATOMIC_RELAXED);
    if (found == NULL) {
        found = object_next_symbol(name);
        __atomic_store_n(known, found, __ATOMIC_RELAXED);
    }
    return found;
}

__attribute__((visibility("hidden"), used)) struct verdict interpose_dlsym(void *handle, const char *symbol,
                                                                           const char *unused, const void *caller) {
    (void)unused;
    return decide(&(struct lookup){
        .handle = handle, .symbol = symbol, .caller = caller, .real = real(&interpose_real_dlsym, "dlsym")});
}

__attribute__((visibility("hidden"), used)) struct verdict interpose_dlvsym(void *handle, const char *symbol,
                                                                            const char *version, const void *caller) {
    return decide(&(struct lookup){.handle = handle,
                                   .symbol = symbol,
                                   .version = version,
                                   .caller = caller,
                                   .real = real(&interpose_real_dlvsym, "dlvsym"),
                                   .versioned = true});
}

/* Define dlsym or dlvsym in assembler. It calls the C code, with the caller's return address as fourth argument, and
 * then returns or jumps as the verdict requires. */
#if defined(__x86_64__)
#define TAIL(name)                                                      \
    __asm__(".pushsection .text\n"                                      \
            ".globl " #name "\n.type " #name ",@function\n" #name ":\n" \
            "  .cfi_startproc\n"                                        \
            "  endbr64\n"                                               \
            "  push %rdi\n  .cfi_adjust_cfa_offset 8\n"                 \
            "  push %rsi\n  .cfi_adjust_cfa_offset 8\n"                 \
            "  push %rdx\n  .cfi_adjust_cfa_offset 8\n"                 \
            "  mov 24(%rsp), %rcx\n"                                    \
            "  call interpose_" #name "\n"                              \
            "  test %rdx, %rdx\n"                                       \
            "  pop %rdx\n  .cfi_adjust_cfa_offset -8\n"                 \
            "  pop %rsi\n  .cfi_adjust_cfa_offset -8\n"                 \
            "  pop %rdi\n  .cfi_adjust_cfa_offset -8\n"                 \
            "  jz 1f\n  ret\n"                                          \
            "1: jmp *interpose_real_" #name "(%rip)\n"                  \
            "  .cfi_endproc\n"                                          \
            ".size " #name ", .-" #name "\n.popsection")
#elif defined(__aarch64__)
#define TAIL(name)                                                                                                  \
    __asm__(".pushsection .text\n"                                                                                  \
            ".globl " #name "\n.type " #name ",%function\n" #name ":\n"                                             \
            "  .cfi_startproc\n"                                                                                    \
            "  hint #34\n" /* bti c */                                                                              \
            "  stp x29, x30, [sp, #-48]!\n  .cfi_def_cfa_offset 48\n  .cfi_offset 29, -48\n  .cfi_offset 30, -40\n" \
            "  stp x0, x1, [sp, #16]\n  str x2, [sp, #32]\n  mov x3, x30\n"                                         \
            "  bl interpose_" #name "\n"                                                                            \
            "  cbz x1, 1f\n"                                                                                        \
            "  ldp x29, x30, [sp], #48\n  ret\n"                                                                    \
            "1: ldp x0, x1, [sp, #16]\n  ldr x2, [sp, #32]\n  ldp x29, x30, [sp], #48\n"                            \
            "  adrp x16, interpose_real_" #name "\n  ldr x16, [x16, #:lo12:interpose_real_" #name "]\n  br x16\n"   \
            "  .cfi_endproc\n"                                                                                      \
            ".size " #name ", .-" #name "\n.popsection")
#endif

TAIL(dlsym);
TAIL(dlvsym);
