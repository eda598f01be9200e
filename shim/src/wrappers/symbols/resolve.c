/* Both forms of cuGetProcAddress, and the table from entry to wrapper.
 *
 * The driver's answer comes first, by its rules of versions and streams. The hook then replaces the driver's function
 * by its wrapper. Under a gated name, a function that the hook does not know is never returned: the hook selects a
 * wrapper by name, version and flags, as the driver does. If the version is newer than the table, the result is "not
 * found".
 */
#include "wrappers/symbols/resolve.h"

#include "base/sys.h"

/* A switch, not an array, because the compiler implements it with addresses relative to the code. So the dynamic linker
 * has nothing to relocate. */
void *wrapper_of(enum entry entry) {
    switch (entry) {
#define WRAPPED(class, symbol, name, since, parameters) \
    case ENTRY_##symbol: return (void *)symbol;
#include "driver/entries.def"
    default: return NULL;
    }
}

/* Replace the driver's function by its wrapper. Return false if no function may be returned. */
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

/* "Not found" is a status in this form. It is an error only if the caller does not request the status. */
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
