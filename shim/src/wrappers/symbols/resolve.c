/* Both forms of cuGetProcAddress, and the table from entry to wrapper.
 *
 * The driver answers first, by its rules of versions and streams. The hook then replaces the driver's function by the
 * function's wrapper. If programs may reach a name only through the hook, and the hook does not know the function, the
 * hook selects a wrapper by name, version and flags, as the driver does. If the version is newer than the table, the
 * result is "not found".
 */
#include "wrappers/symbols/resolve.h"

#include "base/sys.h"

/* A switch instead of an array of addresses: the compiler implements it with relative addresses, which the dynamic
 * linker need not relocate. */
void *wrapper_of(enum entry entry) {
    switch (entry) {
#define WRAPPED(class, symbol, name, since, parameters) \
    case ENTRY_##symbol: return (void *)symbol;
#include "driver/entries.def"
    default: return NULL;
    }
}

/* Replace `*function`, the driver's function, by its wrapper if it has one. Return false if the program must get no
 * function. */
static bool replace(const char *name, void **function, int version, cuuint64_t flags) {
    if (function == NULL || *function == NULL)
        return true;
    enum entry entry = entries_behind(name, *function);
    if (entry != ENTRY_COUNT) {
        *function = wrapper_of(entry);
        return true;
    }
    entry = entries_gated_name(name);
    if (entry == ENTRY_COUNT)
        return true;
    enum entry meant = entries_meant(name, version, (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0);
    *function = meant != ENTRY_COUNT ? wrapper_of(meant) : NULL;
    if (meant != ENTRY_COUNT)
        return true;
    if (entries_first_refusal(entry))
        sys_say("the driver's ", name, " of this version is unknown to the hook and therefore not found", NULL);
    return false;
}

EXPORT CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags) {
    if (!entries_load() || !HAS(cuGetProcAddress))
        return CUDA_ERROR_NOT_FOUND;
    CUresult result = DRIVER(cuGetProcAddress)(name, function, version, flags);
    return result != CUDA_SUCCESS || replace(name, function, version, flags) ? result : CUDA_ERROR_NOT_FOUND;
}

/* This form reports "not found" in `*status`. It returns an error only if `status` is NULL. */
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                                    CUdriverProcAddressQueryResult *status) {
    if (!entries_load() || !HAS(cuGetProcAddress_v2))
        return CUDA_ERROR_NOT_FOUND;
    CUresult result = DRIVER(cuGetProcAddress_v2)(name, function, version, flags, status);
    if (result != CUDA_SUCCESS || replace(name, function, version, flags))
        return result;
    if (status == NULL)
        return CUDA_ERROR_NOT_FOUND;
    *status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_SUCCESS;
}
