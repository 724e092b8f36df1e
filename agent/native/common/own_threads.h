/* The program's signals on our threads: they never run its handlers, which belong on its own threads. */
#ifndef KINETO_OWN_THREADS_H
#define KINETO_OWN_THREADS_H

#include <signal.h>
#include <stddef.h>

/* A thread that is created before the mask is restored to `before` has them blocked for good. Faults belong to the
 * thread itself and stay unblocked, so that the program's own handler (faulthandler) reports them. */
static inline void block_signals(sigset_t *before) {
    static const int OF_FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS};
    sigset_t blocked;
    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof OF_FAULTS / sizeof *OF_FAULTS; i++) {
        sigdelset(&blocked, OF_FAULTS[i]);
    }
    pthread_sigmask(SIG_SETMASK, &blocked, before);
}

#endif
