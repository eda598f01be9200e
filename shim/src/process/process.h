/* What the hook knows in one process, and its start.
 *
 * Guarantees: nothing happens before the first CUDA call: no thread, no socket, no file, no memory. All that is in
 * `struct process` lies in memory that a child of fork finds zeroed, so that it starts as a process that never called
 * CUDA.
 */
#ifndef SHAREPOD_PROCESS_H
#define SHAREPOD_PROCESS_H

#include <cuda.h>

#include "time/gate.h"
#include "process/gpus.h"
#include "time/graphs.h"
#include "memory/memory.h"
#include "session/session.h"
#include "time/streams.h"
#include "base/sys.h"
#include "time/token.h"

/* How long the first CUDA call waits for the file `limits`. */
#ifndef SHAREPOD_START_WAIT_MS
#define SHAREPOD_START_WAIT_MS 30000
#endif

struct process {
    bool unwiped; /* in a child of fork: the kernel has not wiped this on its way */
    struct gate gate;
    struct lock start_lock;
    bool waited; /* for `limits`, in vain: the next call does not wait again */
    char directory[256];
    struct gpus gpus;
    struct session session;
    struct token token;
    struct memory memory;
    struct streams streams;
    struct graphs graphs;
};

/* NULL before the first CUDA call of the program. Its address stays the same in a child of fork. */
extern struct process *_Atomic the_process;

/* Sets the process up, if that is still to be done. CUDA_SUCCESS, or what the CUDA call shall return instead of doing
 * its work. */
CUresult process_enter(void);

#endif
