/* Calls the program's host functions when a stream reaches them: one at a time, in a thread of the double. */
#include <stdlib.h>

#include "device/fake.h"

static pthread_cond_t calling = PTHREAD_COND_INITIALIZER; /* signalled when a function is due */
static struct stream *called;                             /* stream whose function is due to be called; NULL: none */
static struct op due;
static void (*over)(struct stream *stream);
static bool running;

void fake_start_thread(void *(*run)(void *)) {
    pthread_attr_t detached;
    pthread_t thread;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &detached, run, NULL) != 0)
        abort(); /* no test can continue without this thread */
}

static void *call_functions(void *unused) {
    (void)unused;
    pthread_mutex_lock(&fake_lock);
    for (;;) {
        while (called == NULL)
            pthread_cond_wait(&calling, &fake_lock);
        struct op op = due;
        pthread_mutex_unlock(&fake_lock);
        op.call(op.argument);
        pthread_mutex_lock(&fake_lock);
        struct stream *stream = called;
        called = NULL;
        over(stream);
    }
    return NULL;
}

bool fake_call(struct stream *stream, const struct op *op, void (*returned)(struct stream *stream)) {
    if (called != NULL)
        return false;
    if (!running)
        fake_start_thread(call_functions);
    running = true;
    called = stream;
    due = *op;
    over = returned;
    pthread_cond_signal(&calling);
    return true;
}

void fake_calls_forked(void) {
    pthread_cond_init(&calling, NULL);
    running = false;
    called = NULL;
}
