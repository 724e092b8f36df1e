/* How Python source gets to run on a thread of its own: first as a pending call of the interpreter, then as the start
 * routine of the thread that it starts.
 *
 *     python daemon/native/generate_stub_code.py
 *
 * compiles it into the bytes of python_code.py. It is copied into the target alone: no data, no relocation, no libc.
 *
 * On the program's thread nothing of Python happens: no bytecode, no object, no exception, so neither the program's
 * tracers, profilers, audit hooks and signal handlers nor its recursion limit meet it, and it always returns 0. Its
 * signals are blocked while the thread is made, as pthread_create itself does it, so that the new thread never has
 * them open.
 *
 * On the new thread nothing is printed: an exception of the source is fetched, its repr kept, and forgotten.
 * PyGILState_Ensure would end the process where there is no memory for a thread's state; PyThreadState_New says so.
 * The state counts as being traced for all of its life: by that the interpreter keeps the program's trace and
 * profile functions and, from 3.12 on, the tools of sys.monitoring from it. The source finds sys.modules among its
 * globals, so that it can do without builtins.__import__, which may be the program's.
 */
#include "python_stub.h"
#include "common/system_call.h"

static int start(struct python_argument *given);
static void run(struct python_argument *given);

/* First in the file: the bytes begin here. int (*)(void *) and void *(*)(void *): 0 is both. */
void *python_enter(struct python_argument *given) {
    if (given->stage == STAGE_PENDING) {
        (void)start(given);
    } else {
        run(given);
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

static __attribute__((noinline)) int start(struct python_argument *given) {
    const unsigned long blocked = BLOCKED;
    unsigned long before, thread;
    if (given->cancelled != 0 || signal_mask(&blocked, &before) != 0) {
        return 0;
    }
    given->stage = STAGE_THREAD;
    const int error = given->create(&thread, 0, given->code, given);
    (void)signal_mask(&before, 0);
    if (error != 0) {
        given->error = error;
        given->stage = STAGE_NO_THREAD;
    }
    return 0;
}

/* Keeps the words of the exception and forgets it. */
static inline void note_exception(struct python_argument *given) {
    void *type = 0, *value = 0, *traceback = 0;
    given->fetch(&type, &value, &traceback);
    given->normalize(&type, &value, &traceback);
    void *words = value != 0 ? given->repr(value) : 0;
    const char *text = words != 0 ? given->utf8(words) : 0;
    char *said = given->source; /* which has been compiled */
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

/* The first time it begins, the second time it ends. */
static __attribute__((noinline)) void see_to_turns(struct python_argument *given) {
    if (given->turns.code != 0) {
        (void)given->turns.code(&given->turns.as_agent);
    }
}

static __attribute__((noinline)) void run(struct python_argument *given) {
    const unsigned long blocked = BLOCKED;
    const unsigned long name[] = {0x612d6f74656e696bul, 0x746e6567ul}; /* "kineto-agent" */
    (void)signal_mask(&blocked, 0);
    (void)system_call(SYS_PRCTL, PR_SET_NAME, (long)name, 0, 0);
    (void)given->detach(given->self());
    if (given->cancelled != 0) {
        return;
    }
    void *interpreter = given->interpreter();
    void *state = interpreter != 0 ? given->new_state(interpreter) : 0;
    if (state == 0) {
        given->stage = STAGE_NO_STATE;
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
        const unsigned long self[] = {OPENING_MARK, OPENING_MARK_2, (unsigned long)given};
        void *words = given->bytes(self, sizeof self);
        void *native = words != 0 ? given->function(&given->method, words, 0) : 0;
        void *globals = given->new_dict();
        void *result = 0;
        void *modules = given->system(given->modules_name);
        if (globals != 0 && modules != 0 && native != 0 &&
            given->set_item(globals, given->builtins_name, given->builtins()) == 0 &&
            given->set_item(globals, given->modules_name, modules) == 0 &&
            given->set_item(globals, given->native_name, native) == 0) {
            result = given->run(given->source, FILE_INPUT, globals, globals, 0);
        }
        if (result != 0) {
            given->stage = STAGE_ENDED;
        } else {
            note_exception(given);
        }
        given->decref(result);
        given->decref(globals);
        given->decref(native);
        given->decref(words);
    }
    see_to_turns(given);
    given->clear_state(state);
    given->delete_state();
}
