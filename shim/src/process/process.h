/* The hook in one process: storage of everything that it keeps, and its start.
 *
 * Guarantees:
 * - H1 nothing before the first CUDA call: no thread, no socket, no file and no memory of the hook's;
 * - H2 wiped in a child of fork: struct process is zeroed there, and the child is a process that never called CUDA;
 * - H3 set up once: threads that call CUDA at the same time wait until the first of them has set the process up;
 * - H4 nothing without a device: where the driver says that it has none, or is not initialized, the hook starts no
 *   thread and writes nothing;
 * - H5 out of the driver before it ends: once the program's exit has come to what libcuda has registered, or to its
 *   destructors, the hook thread calls no function of the driver;
 * - H6 no wait for the loader: no thread that sets the process up waits for one that loads a library, nor does a child
 *   that was forked meanwhile, if its parent had looked a function of libcuda up or started with libcuda.
 *
 * The rooms below get what they need of struct process as parameters. Only the wrappers, which the program calls, name
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

/* Set the process up if that is still to be done (H3). Return CUDA_SUCCESS, or what the CUDA call shall return instead
 * of doing its work. Costs two loads once the process is set up. */
CUresult process_enter(void);
/* Have the hook leave the driver when the program ends (H5). To be called after the first cuInit: handlers of exit run
 * in reverse order, and so before those that the driver has registered with that. */
void process_watch_exit(void);

#endif
