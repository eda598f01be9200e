/* The hook in one process: storage of all of its state, and its start.
 *
 * Guarantees:
 * - H1 nothing before the first CUDA call: until then the hook has no thread, no socket, no file and no memory. When it
 *   is loaded it makes one system call, fstat of descriptor 2.
 * - H2 wiped in a child of fork: Linux zeroes struct process there, so to the hook the child has never called CUDA.
 * - H3 set up once: the first thread that calls CUDA sets up the process. Other threads that call CUDA wait for it.
 * - H4 nothing without a device: if the driver reports no device, or is not initialized, the hook starts no thread and
 *   writes nothing.
 * - H5 out of the driver before it ends: when the program exits, the hook thread stops calling the driver before
 *   libcuda's exit handlers and the program's destructors run.
 * - H6 no wait for the loader: a thread that sets up the process does not wait for a thread that loads a library. A
 *   child that was forked during a load does not wait either, if its parent had already looked up a function of libcuda
 *   or was linked with libcuda.
 *
 * Lower packages get their parts of struct process as parameters. Only the wrappers, which the program calls, use
 * the_process. memory/ gets its part from memory_state().
 */
#ifndef SHAREPOD_PROCESS_H
#define SHAREPOD_PROCESS_H

#include <cuda.h>

#include "base/sys.h"
#include "memory/state.h"
#include "process/freed.h"
#include "process/hook_thread.h"
#include "session/session.h"
#include "tenant/gpus.h"
#include "time/gate/gate.h"
#include "time/queue/graph_times.h"
#include "time/streams.h"
#include "time/token.h"

/* ms for which the first CUDA call waits for the file `limits`, because the agent may be starting. */
#ifndef SHAREPOD_START_WAIT_MS
#define SHAREPOD_START_WAIT_MS 30000
#endif

struct process {
    bool unwiped; /* set to true when the process is set up. If it is still true in a child of fork, Linux has not
                     zeroed struct process (H2) */
    struct gate gate;
    struct lock start_lock;
    bool waited; /* a CUDA call has waited for the file `limits` in vain: the next call does not wait */
    char directory[256];
    struct gpus gpus;
    struct session session;
    struct token token;
    struct memory memory;
    struct freed_memory freed;
    struct streams streams;
    struct graphs graphs;
    struct hook_thread thread;
};

/* Address of the process's state; NULL before the first CUDA call of the program. It stays the same in a child of fork.
 */
extern struct process *_Atomic the_process;

/* Set up the process, if that is not done yet (H3). Return CUDA_SUCCESS, or an error that the wrapped call must return
 * without doing its work. Costs two loads once the process is set up. */
CUresult process_enter(void);
/* Register an exit handler that stops the hook's driver calls when the program ends (H5). Call this after the first
 * cuInit: exit handlers run in reverse order, so this one runs before the driver's. */
void process_watch_exit(void);

#endif
