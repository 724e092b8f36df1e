/* Runs Python source on a thread of its own: first called as a pending call of the interpreter, then as the start
 * routine of the thread that it starts.
 *
 *     python daemon/native/generate_stub_code.py
 *
 * compiles it into the bytes of python_code.py. Only these bytes are copied into the target: no data, no relocation, no
 * libc.
 *
 * On the program's thread it runs no bytecode and leaves no exception, so it does not affect the program's tracers,
 * profilers, audit hooks, signal handlers or recursion limit; it always returns 0. Signals are blocked while the thread
 * is created, as pthread_create itself does, so that the new thread never has them unblocked. From 3.12 on, our thread
 * would make a single-threaded program warn when it forks: so warning filters are added first (hush() of
 * opening_stub.c), and stay until the thread has ended, for which the program's main thread waits (leave).
 *
 * The source is compiled and then evaluated: with PyRun_String the interpreter would forget that an interrupt ends the
 * program, which would then exit with status 1.
 *
 * On the new thread nothing is printed: an exception of the source is fetched, its repr kept, and cleared.
 * PyGILState_Ensure would end the process if there were no memory for a thread state; PyThreadState_New reports it. The
 * state counts as being traced all its life: so the interpreter does not call the program's trace and profile functions
 * or, from 3.12 on, the tools of sys.monitoring on it. The source gets sys.modules in its globals, so that it does not
 * need builtins.__import__, which may be the program's.
 */
#include "python_stub.h"
#include "common/system_call.h"

static int start(struct python_argument *given);
static void run(struct python_argument *given);
static void leave(struct python_argument *given);

/* First in the file: the bytes begin here. int (*)(void *) and void *(*)(void *): 0 is both. */
void *python_enter(struct python_argument *given) {
    if (given->stage == STAGE_PENDING) {
        (void)start(given);
    } else if (given->stage < STAGE_ENDED) {
        run(given);
    } else {
        leave(given);
    }
    return 0;
}

static inline long signal_mask(const unsigned long *set, unsigned long *old) {
    return system_call(SYS_RT_SIGPROCMASK, 2, (long)set, (long)old, sizeof *set);
}

#define BIT(number) (1UL << ((number) - 1))
/* All but the synchronous ones (ILL, TRAP, ABRT, BUS, FPE, SEGV, SYS) and the C library's own two. */
#define BLOCKED (~0UL & ~(BIT(4) | BIT(5) | BIT(6) | BIT(7) | BIT(8) | BIT(11) | BIT(31) | BIT(32) | BIT(33)))
#define FILE_INPUT 257
#define PR_SET_NAME 15L
#define MAIN_THREAD_ONLY 1
#define FUTEX_WAIT_PRIVATE 128L
#define LEAVES_NS 50000ul
#define LEAVES_LOOKS 100 /* 10 ms */
#define TURNS_LOOKS 5000

/* Adds filters for the fork warning to the interpreter's list, or removes them: opening_stub.c. */
static __attribute__((noinline)) void hush(struct python_argument *given) {
    const unsigned long self[] = {OPENING_MARK, OPENING_MARK_2, (unsigned long)given};
    (void)given->method.code(self, 0);
}

static __attribute__((noinline)) int start(struct python_argument *given) {
    const unsigned long blocked = BLOCKED;
    unsigned long before, thread;
    const long process = own_process(); /* a child that is forked before the call inherits the request */
    if (given->cancelled != 0 || process != given->error || signal_mask(&blocked, &before) != 0) {
        return 0;
    }
    hush(given);
    given->stage = STAGE_THREAD;
    const int error = given->create(&thread, 0, given->code, given);
    (void)signal_mask(&before, 0);
    if (error != 0) {
        hush(given);
        given->error = error;
        given->stage = STAGE_NO_THREAD;
    }
    return 0;
}

/* Keeps the text of the exception and clears it. */
static inline void note_exception(struct python_argument *given) {
    void *type = 0, *value = 0, *traceback = 0;
    given->fetch(&type, &value, &traceback);
    given->normalize(&type, &value, &traceback);
    void *words = value != 0 ? given->repr(value) : 0;
    const char *text = words != 0 ? given->utf8(words) : 0;
    char *said = given->source; /* has been compiled, so its memory is free */
    for (int left = SAID_BYTES; text != 0 && *text != 0 && left > 1; left--) {
        *(volatile char *)said++ = *text++;
    }
    *said = 0;
    given->clear();
    given->decref(words);
    given->decref(traceback);
    given->decref(value);
    given->decref(type);
    given->stage = STAGE_RAISED;
}

static __attribute__((noinline)) void await_end(struct python_argument *given, long thread, int looks) {
    const unsigned long pause[] = {0, LEAVES_NS};
    const long process = own_process();
    while (looks-- > 0 && system_call(SYS_TGKILL, process, thread, 0, 0) == 0) {
        (void)system_call(SYS_FUTEX, (long)&given->stage, FUTEX_WAIT_PRIVATE, given->stage, (long)pause);
    }
}

/* Begins turns on the first call, ends them on the second. */
static __attribute__((noinline)) void see_to_turns(struct python_argument *given) {
    if (given->turns.code != 0) {
        (void)given->turns.code(&given->turns.as_agent);
    }
}

/* Makes the program's main thread remove the filters once this thread has ended. Needs no GIL. */
static __attribute__((noinline)) int leaves(struct python_argument *given, void *interpreter) {
    return interpreter != 0 && given->turns.queue != 0 &&
           given->turns.queue(interpreter, given->code, (void *)given, MAIN_THREAD_ONLY) == 0;
}

static __attribute__((noinline)) void run(struct python_argument *given) {
    const unsigned long blocked = BLOCKED;
    const unsigned long name[] = {0x612d6f74656e696bul, 0x746e6567ul}; /* "kineto-agent" */
    (void)signal_mask(&blocked, 0);
    (void)system_call(SYS_PRCTL, PR_SET_NAME, (long)name, 0, 0);
    (void)given->detach(given->self());
    given->error = system_call(SYS_GETTID, 0, 0, 0, 0);
    void *interpreter = given->interpreter();
    void *state = interpreter != 0 ? given->new_state(interpreter) : 0;
    if (state == 0) {
        given->stage = STAGE_NO_STATE;
        (void)leaves(given, interpreter);
        return;
    }
    given->stage = STAGE_WAITS;
    see_to_turns(given);
    given->acquire(state);
    if (given->enter_tracing != 0) {
        given->enter_tracing(state);
    }
    if (given->cancelled == 0) {
        given->stage = STAGE_RUNS;
        if (given->hushed == 0) {
            hush(given);
        }
        const unsigned long self[] = {OPENING_MARK, OPENING_MARK_2, (unsigned long)given};
        void *words = given->bytes(self, sizeof self);
        void *native = words != 0 ? given->function(&given->method, words, 0) : 0;
        void *globals = given->new_dict();
        void *code = 0, *result = 0;
        void *modules = given->system(given->modules_name);
        if (globals != 0 && modules != 0 && native != 0 &&
            given->set_item(globals, given->builtins_name, given->builtins()) == 0 &&
            given->set_item(globals, given->modules_name, modules) == 0 &&
            given->set_item(globals, given->native_name, native) == 0) {
            code = given->compile(given->source, given->file, FILE_INPUT);
            result = code != 0 ? given->evaluate(code, globals, globals) : 0;
        }
        if (result != 0) {
            given->stage = STAGE_ENDED;
        } else {
            note_exception(given);
        }
        given->decref(result);
        given->decref(code);
        given->decref(globals);
        given->decref(native);
        given->decref(words);
    } else {
        given->stage = STAGE_ENDED;
    }
    see_to_turns(given);
    if (given->hushed != 0) {
        void *own = given->turns.release();
        await_end(given, given->turns.own, TURNS_LOOKS);
        given->turns.restore(own);
        if (!leaves(given, interpreter)) {
            hush(given);
        }
    }
    given->clear_state(state);
    given->delete_state();
}

/* On the program's main thread, when ours is about to end: removes the filters after it has. */
static __attribute__((noinline)) void leave(struct python_argument *given) {
    await_end(given, given->error, LEAVES_LOOKS);
    if (given->hushed != 0) {
        hush(given);
    }
}
