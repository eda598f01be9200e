/* cuGetProcAddress of the double: it finds every name of the headers, by the CUDA version in which its forms appeared.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/fake.h"
#include "device/names.h"

static const struct fake_name *first_of(const char *name) {
    unsigned low = 0, high = fake_name_count;
    while (low < high) {
        unsigned middle = (low + high) / 2;
        if (strcmp(fake_names[middle].name, name) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low < fake_name_count && strcmp(fake_names[low].name, name) == 0 ? &fake_names[low] : NULL;
}

static void *find(const char *name, int version, bool per_thread, CUdriverProcAddressQueryResult *found) {
    const struct fake_name *form = first_of(name), *last = fake_names + fake_name_count;
    *found = form == NULL ? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND : CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
    for (; form != NULL && form < last && strcmp(form->name, name) == 0; form++)
        if (form->per_thread == per_thread && form->since <= version) {
            *found = CU_GET_PROC_ADDRESS_SUCCESS;
            return form->symbol;
        }
    return NULL;
}

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **out, int version, cuuint64_t flags,
                                    CUdriverProcAddressQueryResult *status) {
    const cuuint64_t known = CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    if (name == NULL || out == NULL || (flags & ~known) != 0 || flags == known || version <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    *out = NULL;
    if (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM)
        *out = find(name, version, true, &found);
    if (*out == NULL)
        *out = find(name, version, false, &found);
    if (status != NULL)
        *status = found;
    return *out != NULL || status != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuGetProcAddress(const char *name, void **out, int version, cuuint64_t flags) {
    return cuGetProcAddress_v2(name, out, version, flags, NULL);
}

/* The double has no export tables, which are undocumented. */
EXPORT CUresult cuGetExportTable(const void **table, const CUuuid *id) {
    if (table == NULL || id == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}

int fake_unsupported(const char *symbol) {
    enum { MOST = 1024 };
    static _Atomic(const char *) logged[MOST];
    if (getenv("FAKE_CUDA_VERBOSE") == NULL)
        return CUDA_ERROR_NOT_SUPPORTED;
    for (int i = 0; i < MOST; i++) {
        const char *none = NULL;
        if (logged[i] == symbol)
            break;
        if (atomic_compare_exchange_strong(&logged[i], &none, symbol)) {
            fprintf(stderr, "fake CUDA: %s has no behaviour here\n", symbol);
            break;
        }
    }
    return CUDA_ERROR_NOT_SUPPORTED;
}
