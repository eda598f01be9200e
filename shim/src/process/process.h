/* The hook in one process: what it keeps, and its start.
 *
 * Guarantees:
 * - before the first CUDA call there is no thread, no socket, no file and no memory of the hook's;
 * - struct process lies in memory that a child of fork finds zeroed: the child is a process that never called CUDA.
 *
 * The rooms below get what they need of struct process as parameters. Only the wrappers, which the program calls, name
 * the_process.
 */
#ifndef SHAREPOD_PROCESS_H
#define SHAREPOD_PROCESS_H

#include <cuda.h>

#include "base/sys.h"
#include "memory/state.h"
#include "process/hook_thread.h"
#include "session/session.h"
#include "tenant/gpus.h"
#include "time/gate.h"
#include "time/graph_times.h"
#include "time/streams.h"
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
    struct hook_thread thread;
};

/* NULL before the first CUDA call of the program. Its address stays the same in a child of fork. */
extern struct process *_Atomic the_process;

/* Sets the process up, if that is still to be done. CUDA_SUCCESS, or what the CUDA call shall return instead of doing
 * its work. */
CUresult process_enter(void);

#endif
