/* First process of a pod, which keeps its namespaces: reaps inherited orphans until a signal ends it. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void finish(int number) {
    (void)number;
    _exit(0);
}

static void reap(int number) {
    (void)number;
    while (waitpid(-1, NULL, WNOHANG) > 0)
        ;
}

int main(void) {
    const struct sigaction ending = {.sa_handler = finish};
    const struct sigaction reaping = {.sa_handler = reap, .sa_flags = SA_NOCLDSTOP};
    sigaction(SIGINT, &ending, NULL);
    sigaction(SIGTERM, &ending, NULL);
    sigaction(SIGCHLD, &reaping, NULL);
    for (;;)
        pause();
}
