/* A thread that Python knows nothing of: it spins, or sleeps, until it is told to end. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

static atomic_int state; /* 1: spin, 2: sleep, 0: end */
static atomic_int tid;
static pthread_t thread;

static void *run(void *unused) {
    (void)unused;
    tid = (int)syscall(SYS_gettid);
    while (state != 0) {
        if (state == 2) {
            usleep(1000000);
        }
    }
    return NULL;
}

int spinner_start(const char *name, int what) {
    state = what;
    tid = 0;
    if (pthread_create(&thread, NULL, run, NULL) != 0) {
        return -1;
    }
    (void)pthread_setname_np(thread, name);
    while (tid == 0) {
    }
    return tid;
}

void spinner_end(void) {
    state = 0;
    pthread_join(thread, NULL);
}
