/* What this process has of device memory, and the lock that all of it is read and written with: that of struct gpus. */
#ifndef SHAREPOD_BOOKS_H
#define SHAREPOD_BOOKS_H

#include "memory/memory.h"
#include "process/process.h"

static inline struct memory *books(void) {
    return &the_process->memory;
}

static inline void books_lock(void) {
    lock(&the_process->gpus.lock);
}

static inline void books_unlock(void) {
    unlock(&the_process->gpus.lock);
}

#endif
