/* See begin_turns.h.
 *
 * Theory of operation
 *   There is one struct for the life of the process: the interpreter may still have a call of it queued when the agent
 *   has ended, and so may a forked child. So the next agent of this process waits until the thread of the last one has
 *   left it. A forked child has the struct but no such thread, and starts from scratch.
 *
 *   A sub-interpreter may have its own GIL, and the main one makes the calls: there the agent has no such thread.
 *
 * Threads: kc_turns_begin on the one that starts the agent's, with the GIL: so one at a time; kc_turns_poll on the
 *   agent's. `enter` is the thread itself, or runs where the interpreter makes the call (gil_turns.c).
 * Blocks: only kc_turns_poll.
 */
#define _GNU_SOURCE
#include "turns/begin_turns.h"

#include <dlfcn.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/own_threads.h"
#include "turns/gil_turns.h"

_Static_assert(sizeof(pthread_attr_t) <= ATTRIBUTES_BYTES, "room for it in gil_turns.c");

static struct python_turns self;
static bool runs; /* the thread is running */

KC_EXPORT uint32_t kc_turns_abi(void) { return KC_TURNS_ABI; }

static void *enter(struct turns_role_of *role) {
    const bool is_thread = role->role == ROLE_THREAD;
    void *result = turns_enter(role);
    if (is_thread) {
        __atomic_store_n(&runs, false, __ATOMIC_RELEASE); /* it uses nothing of ours any more */
    }
    return result;
}

static void *thread(void *role) { return enter(role); }

static int make_thread(unsigned long *made, void *attributes, turns_code *code, struct turns_role_of *role) {
    (void)code; /* enter */
    sigset_t before;
    __atomic_store_n(&runs, true, __ATOMIC_RELAXED);
    block_signals(&before);
    const int error = pthread_create((pthread_t *)made, attributes, thread, role);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) {
        __atomic_store_n(&runs, false, __ATOMIC_RELAXED);
    }
    return error;
}

static int stack_size(void *attributes, unsigned long bytes) { return pthread_attr_setstacksize(attributes, bytes); }

static int attributes_of(void *attributes) { return pthread_attr_init(attributes); }

static unsigned long own_thread(void) { return (unsigned long)pthread_self(); }

static int detach_thread(unsigned long thread) { return pthread_detach((pthread_t)thread); }

/* The interpreter's function of that name. */
static bool find(void *into, const char *name) {
    void *found = dlsym(RTLD_DEFAULT, name);
    memcpy(into, &found, sizeof found);
    return found != NULL;
}

/* `turns`: all zero. */
static bool fill(struct python_turns *turns) {
    void *(*interpreter)(void);
    turns->as_agent = (struct turns_role_of){ROLE_BEGIN, &self};
    turns->as_thread = (struct turns_role_of){ROLE_THREAD, &self};
    turns->as_call = (struct turns_role_of){ROLE_CALL, &self};
    turns->awaited = 1;
    turns->code = enter;
    turns->attributes = attributes_of;
    turns->stack = stack_size;
    turns->create = make_thread;
    turns->self = own_thread;
    turns->detach = detach_thread;
    return find(&turns->interpreter, "PyInterpreterState_Main") && find(&interpreter, "PyInterpreterState_Get") &&
           find(&turns->initialised, "Py_IsInitialized") && find(&turns->queue, "_PyEval_AddPendingCall") &&
           find(&turns->release, "PyEval_SaveThread") && find(&turns->restore, "PyEval_RestoreThread") &&
           interpreter() == turns->interpreter();
}

KC_EXPORT intptr_t kc_turns_begin(void) {
    struct python_turns turns = {0};
    const bool forked = self.process != (unsigned int)getpid();
    if (!forked && __atomic_load_n(&runs, __ATOMIC_ACQUIRE)) {
        return self.over != 0 ? KC_ORDER : KC_SYSTEM;
    }
    if (!fill(&turns)) {
        return KC_LIBRARY;
    }
    turns.queued = forked ? 0 : self.queued;
    turns.handed = forked ? 0 : self.handed;
    runs = false;
    self = turns;
    (void)turns_enter(&self.as_agent);
    return __atomic_load_n(&runs, __ATOMIC_RELAXED) ? (intptr_t)&self : KC_SYSTEM;
}

KC_EXPORT int kc_turns_poll(struct pollfd *descriptors, uint32_t count, int timeout_ms) {
    const int ready = poll(descriptors, count, timeout_ms);
    self.rest = 0;
    (void)syscall(SYS_futex, &self.rest, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    return ready;
}
