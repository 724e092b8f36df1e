/* Theory of operation
 *
 * Up to CPython 3.13, a thread that asks for the GIL of an interpreter that has ended is ended by pthread_exit, which
 * unwinds its stack. XLA asks for it again in a destructor, which lets no exception through: C++ then calls its terminate
 * handler, and the process ends with SIGABRT in place of its own status. This handler lets a thread of ours, known by its
 * name, stand still until the process is gone, and every other thread have what was there before. Ours holds neither
 * the GIL nor a lock of the library then, whose call is over but for that.
 *
 * Threads: prepare on the agent's, place on the program's main thread at its exit, the handler on any.
 * Blocks: the handler, for good, on threads of ours alone.
 */
#define _GNU_SOURCE
#include "common/exit_guard.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NAME_BYTES 16
#define OURS "kineto-" /* system/threads.py */

typedef void (*handler)(void);

static handler (*get_handler)(void);
static handler (*set_handler)(handler);
static handler before;

static void stand_still_if_ours(void) {
    char name[NAME_BYTES] = "";
    sigset_t all;
    const bool is_main = syscall(SYS_gettid) == getpid();
    if (!is_main && prctl(PR_GET_NAME, name, 0, 0, 0) == 0 && strncmp(name, OURS, strlen(OURS)) == 0) {
        sigfillset(&all);
        (void)pthread_sigmask(SIG_SETMASK, &all, NULL);
        for (;;) {
            (void)pause();
        }
    }
    if (before != NULL) {
        before();
    }
    abort();
}

uint32_t kc_exit_guard_abi(void) { return KC_EXIT_GUARD_ABI; }

int kc_exit_guard_prepare(void) {
    void *library = dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD);
    if (library == NULL) {
        return 1;
    }
    *(void **)&get_handler = dlsym(library, "_ZSt13get_terminatev");
    *(void **)&set_handler = dlsym(library, "_ZSt13set_terminatePFvvE");
    return get_handler == NULL || set_handler == NULL; /* the reference stays: the handler must */
}

void kc_exit_guard_place(void) {
    if (get_handler != NULL && set_handler != NULL && get_handler() != stand_still_if_ours) {
        before = get_handler();
        (void)set_handler(stand_still_if_ours);
    }
}
