/* Charging a call: its bytes are reserved before the driver is asked, held or rolled back after. */
#include "memory/charge.h"

#include "memory/credits.h"
#include "memory/lock.h"

CUresult charge_begin(struct charge *charge, CUcontext context, int place, uint64_t bytes) {
    charge->holding = NULL;
    if (place < 0 && gpus_ungated(books()->gpus))
        return CUDA_SUCCESS;
    if (place < 0) /* a GPU that is none of the tenant's: its limit there is 0 */
        return CUDA_ERROR_OUT_OF_MEMORY;
    books_lock();
    struct holding *holding = holdings_make(&books()->holdings);
    books_unlock();
    if (holding == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    holding->bytes = bytes;
    holding->context = context;
    holding->place = (int8_t)place;
    if (!credits_reserve(place, bytes)) {
        books_lock();
        holdings_drop(&books()->holdings, holding);
        books_unlock();
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    charge->holding = holding;
    return CUDA_SUCCESS;
}

void charge_end(struct charge *charge, bool made, enum holding_kind kind, uint64_t key) {
    struct holding *holding = charge->holding;
    if (holding == NULL)
        return;
    if (!made) {
        uncharge_end(holding, true);
        return;
    }
    holding->kind = (uint8_t)kind;
    holding->key = key;
    books_lock();
    holdings_add(&books()->holdings, holding);
    books_unlock();
}

struct holding *uncharge_begin(enum holding_kind kind, uint64_t key) {
    books_lock();
    struct holding *holding = holdings_take(&books()->holdings, kind, key);
    books_unlock();
    return holding;
}

void uncharge_end(struct holding *holding, bool freed) {
    if (holding == NULL)
        return;
    if (freed)
        credits_return(holding->place, holding->bytes);
    books_lock();
    if (freed)
        holdings_drop(&books()->holdings, holding);
    else
        holdings_add(&books()->holdings, holding);
    books_unlock();
}

void memory_rename_context(CUcontext from, CUcontext to) {
    struct holdings *holdings = &books()->holdings;
    books_lock();
    for (size_t i = 0; i < holdings->bucket_count; i++)
        for (struct holding *holding = holdings->buckets[i]; holding != NULL; holding = holding->next)
            if (holding->context == from)
                holding->context = to;
    books_unlock();
}
