/* The ways in that are not a plain symbol: dlsym, dlvsym and both forms of cuGetProcAddress.
 *
 * dlsym and dlvsym end in a jump to the real one, with the caller's return address in its place: with RTLD_NEXT the C
 * library goes by that address, and a forwarding call would make it search behind the hook instead of behind the
 * caller.
 */
#include "entries.h"
#include "objects.h"
#include "sys.h"

#include <stdatomic.h>

/* What the jump needs from the C code: the answer, or that there is none and the real function shall answer. */
struct verdict {
    void *answer;
    long decided;
};

__attribute__((visibility("hidden"), used)) void *resolve_real_dlsym, *resolve_real_dlvsym;

static bool pseudo_handle(void *handle) {
    return handle == (void *)0 || handle == (void *)-1l; /* RTLD_DEFAULT, RTLD_NEXT */
}

/* NULL, with something for dlerror to say: programs print it without looking. */
static struct verdict refuse(void *handle, void *real, bool versioned, const char *version) {
    const char *absent = "(a function of libcuda that is not to be had)";
    if (versioned)
        ((void *(*)(void *, const char *, const char *))real)(handle, absent, version);
    else
        ((void *(*)(void *, const char *))real)(handle, absent);
    return (struct verdict){NULL, true};
}

static struct verdict decide(void *handle, const char *symbol, void *real, bool versioned, const char *version) {
    struct verdict undecided = {NULL, real == NULL}; /* no C library function to ask: not found */
    enum entry entry = entries_exported(symbol);
    if (entry == ENTRY_COUNT || real == NULL)
        return undecided;
    bool there = entries_load() && entries_driver[entry] != NULL;
    if (pseudo_handle(handle))
        return there ? (struct verdict){entries_wrapper(entry), true} : refuse(handle, real, versioned, version);
    if (!there)
        return undecided;
    void *found = versioned ? ((void *(*)(void *, const char *, const char *))real)(handle, symbol, version)
                            : ((void *(*)(void *, const char *))real)(handle, symbol);
    if (found == entries_driver[entry])
        found = entries_wrapper(entry);
    else if (entries_must_pass(entry) && object_holds(found, DRIVER_FILE)) {
        sys_say(symbol, " of a second libcuda is not handed out: only one driver at a time is gated", NULL);
        return refuse(handle, real, versioned, version);
    }
    return (struct verdict){found, true};
}

__attribute__((visibility("hidden"), used)) struct verdict resolve_dlsym(void *handle, const char *symbol) {
    if (resolve_real_dlsym == NULL)
        resolve_real_dlsym = object_libc_symbol("dlsym");
    return decide(handle, symbol, resolve_real_dlsym, false, NULL);
}

__attribute__((visibility("hidden"), used)) struct verdict resolve_dlvsym(void *handle, const char *symbol,
                                                                          const char *version) {
    if (resolve_real_dlvsym == NULL)
        resolve_real_dlvsym = object_libc_symbol("dlvsym");
    return decide(handle, symbol, resolve_real_dlvsym, true, version);
}

#if defined(__x86_64__)
#define TAIL(name)                                                      \
    __asm__(".pushsection .text\n"                                      \
            ".globl " #name "\n.type " #name ",@function\n" #name ":\n" \
            "  endbr64\n"                                               \
            "  push %rdi\n  push %rsi\n  push %rdx\n"                   \
            "  call resolve_" #name "\n"                                \
            "  test %rdx, %rdx\n"                                       \
            "  pop %rdx\n  pop %rsi\n  pop %rdi\n"                      \
            "  jz 1f\n  ret\n"                                          \
            "1: jmp *resolve_real_" #name "(%rip)\n"                    \
            ".size " #name ", .-" #name "\n.popsection")
#elif defined(__aarch64__)
#define TAIL(name)                                                                                            \
    __asm__(".pushsection .text\n"                                                                            \
            ".globl " #name "\n.type " #name ",%function\n" #name ":\n"                                       \
            "  stp x29, x30, [sp, #-48]!\n  stp x0, x1, [sp, #16]\n  str x2, [sp, #32]\n"                     \
            "  bl resolve_" #name "\n"                                                                        \
            "  cbz x1, 1f\n"                                                                                  \
            "  ldp x29, x30, [sp], #48\n  ret\n"                                                              \
            "1: ldp x0, x1, [sp, #16]\n  ldr x2, [sp, #32]\n  ldp x29, x30, [sp], #48\n"                      \
            "  adrp x16, resolve_real_" #name "\n  ldr x16, [x16, #:lo12:resolve_real_" #name "]\n  br x16\n" \
            ".size " #name ", .-" #name "\n.popsection")
#endif

TAIL(dlsym);
TAIL(dlvsym);

/* Said once for each name, however often it is asked for. */
static void say_unknown(enum entry entry, const char *name) {
    static _Atomic bool said[ENTRY_COUNT];
    if (!atomic_exchange(&said[entry], true))
        sys_say("the driver's ", name, " of this version is unknown to the hook and therefore reported as not found", NULL);
}

/* The driver has answered: give its function's wrapper instead. A gated name must not come out under a pointer that we
 * don't know. */
static bool replace(const char *name, void **function) {
    if (function == NULL || *function == NULL)
        return true;
    enum entry entry = entries_behind(name, *function);
    if (entry != ENTRY_COUNT) {
        *function = entries_wrapper(entry);
        return true;
    }
    entry = entries_gated_name(name);
    if (entry == ENTRY_COUNT)
        return true;
    *function = NULL;
    say_unknown(entry, name);
    return false;
}

EXPORT CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags) {
    if (!entries_load() || !HAS(cuGetProcAddress))
        return CUDA_ERROR_NOT_FOUND;
    CUresult result = DRIVER(cuGetProcAddress)(name, function, version, flags);
    return result != CUDA_SUCCESS || replace(name, function) ? result : CUDA_ERROR_NOT_FOUND;
}

/* Not found is a status here, and an error only for who does not ask for it. */
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                                    CUdriverProcAddressQueryResult *status) {
    if (!entries_load() || !HAS(cuGetProcAddress_v2))
        return CUDA_ERROR_NOT_FOUND;
    CUresult result = DRIVER(cuGetProcAddress_v2)(name, function, version, flags, status);
    if (result != CUDA_SUCCESS || replace(name, function))
        return result;
    if (status == NULL)
        return CUDA_ERROR_NOT_FOUND;
    *status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_SUCCESS;
}
