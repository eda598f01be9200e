/* The hook in one process: storage of its whole state, and its start.
 *
 * Guarantees:
 * - H1 nothing before the first CUDA call: no thread, no socket, no file and no memory of the hook. When it is loaded
 *   it makes one system call, fstat of descriptor 2.
 * - H2 wiped in a child of fork: struct process is zeroed there, and the child is a process that never called CUDA.
 * - H3 set up once: threads that call CUDA at the same time wait until the first of them has set the process up.
 * - H4 nothing without a device: if the driver reports no device, or is not initialized, the hook starts no thread and
 *   writes nothing.
 * - H5 out of the driver before it ends: once the program's exit has reached libcuda's exit handlers, or its
 *   destructors, the hook thread calls no function of the driver.
 * - H6 no wait for the loader: no thread that sets the process up waits for a thread that loads a library. Nor does a
 *   child that was forked during a load, if its parent had looked up a function of libcuda or started with libcuda.
 *
 * Lower packages get their parts of struct process as parameters. Only the wrappers, which the program calls, name
 * the_process; memory/ reaches its part by memory_state().
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

/* How long the first CUDA call waits for the file `limits`, ms: the agent may be starting. */
#ifndef SHAREPOD_START_WAIT_MS
#define SHAREPOD_START_WAIT_MS 30000
#endif

struct process {
    bool unwiped; /* set, and still set in a child of fork: the kernel has not wiped the memory on the way (H2) */
    struct gate gate;
    struct lock start_lock;
    bool waited; /* for `limits`, in vain: the next call does not wait again */
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

/* NULL before the first CUDA call of the program. Its address stays the same in a child of fork. */
extern struct process *_Atomic the_process;

/* Set the process up, if not yet done (H3). Return CUDA_SUCCESS, or the error that the CUDA call must return instead of
 * its work. Costs two loads once the process is set up. */
CUresult process_enter(void);
/* Have the hook leave the driver when the program ends (H5). Call this after the first cuInit: exit handlers run in
 * reverse order, so this one runs before the driver's. */
void process_watch_exit(void);

#endif
