/* A library whose constructor makes a CUDA call. At that time another thread, which the constructor has started, is in
 * the first CUDA call of the process.
 *
 * The loader holds a lock while constructors run. So the other thread's CUDA call must not wait for the loader: it
 * would wait for the end of this constructor.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

int cuDriverGetVersion(int *version);
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total);

static _Atomic int thread_id;

static void *first_call(void *unused) {
    size_t free_bytes, total;
    thread_id = (int)syscall(SYS_gettid);
    cuMemGetInfo_v2(&free_bytes, &total);
    return unused;
}

/* Return whether the thread sleeps, or has ended. */
static int sleeps(int thread) {
    char path[64], name[64], state = 'X';
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread);
    FILE *file = fopen(path, "r");
    if (file != NULL) {
        if (fscanf(file, "%*d %63s %c", name, &state) != 2)
            state = 'R';
        fclose(file);
    }
    return state != 'R';
}

__attribute__((constructor)) static void begin(void) {
    pthread_t thread;
    size_t free_bytes, total;
    pthread_create(&thread, NULL, first_call, NULL);
    pthread_detach(thread);
    while (thread_id == 0 || !sleeps(thread_id))
        usleep(1000);
    cuMemGetInfo_v2(&free_bytes, &total);
}
