/* How a thread of ours gets turns with the GIL if the interpreter does not provide them.
 *
 * A thread that waits for the GIL asks for it after 5 ms. But each time the GIL is released and retaken, if
 * only for a microsecond around a write(), CPython restarts the count, and a sleeping thread takes longer to wake than
 * the owner takes to get it back. In a program that does so every millisecond, we get each turn by chance: a trace that
 * needs some hundred of them began after seconds, or not at all.
 *
 * This file is compiled twice: into the agent's library, for an agent that starts by itself (begin_turns.c), and by
 *
 *     python daemon/native/generate_stub_code.py
 *
 * into the bytes of turns_code.py, which a live attach copies into the target alone: no data, no relocation, no libc.
 *
 * The thread is started before the agent's own needs the GIL for the first time. It sleeps while the agent waits for
 * something else. If the agent has had less than WORKS_NS of processor time for TURN_MS although it is at work, or has
 * not yet stored its thread id, the thread makes the interpreter call us: on a thread of the program, between two
 * bytecodes, where any other thread might get the GIL as well. There the GIL is released for PAUSE_NS. No Python code
 * is run. A call that comes late, or in a forked child, does nothing.
 *
 * The call is queued for the main interpreter by name: Py_AddPendingCall, before 3.12, asks the thread that has the GIL
 * for its interpreter, and that thread may be ending. And for the main thread only: another one may find the
 * interpreter ending when it wants the GIL back; from 3.13 on it then never returns, and the interpreter waits for the
 * call forever.
 *
 * Threads: take_care is the thread's own, without the GIL; give_away runs on the program's main thread, with the GIL;
 *   begin and end on the agent's, begin also on one that is about to start the agent's.
 * Blocks: take_care sleeps; give_away for PAUSE_NS without the GIL, and until it has the GIL again. begin and end do
 *   not.
 */
#include "turns/gil_turns.h"

#include "common/system_call.h"

static void begin(struct python_turns *turns);
static void end(struct python_turns *turns);
static void take_care(struct python_turns *turns);
static void give_away(struct python_turns *turns);

/* First in the file: the bytes begin here. int (*)(void *) and void *(*)(void *): 0 suits both. */
void *turns_enter(struct turns_role_of *role) {
    if (role->role == ROLE_CALL) {
        give_away(role->given);
    } else if (role->role == ROLE_THREAD) {
        take_care(role->given);
    } else if (role->role == ROLE_BEGIN) {
        role->role = ROLE_END;
        begin(role->given);
    } else {
        end(role->given);
    }
    return 0;
}

#define MAIN_THREAD_ONLY 1 /* there is no such parameter before 3.12 */
#define STACK_BYTES (256ul << 10)
#define TURN_MS 3
#define PAUSE_NS 60000L
/* Processor time of a turn. A thread that waits for the GIL is woken each time it is released: that took 32 % of a
 * processor at some 15,000 times a second. */
#define WORKS_NS 1500000ul
#define TRIES_A_STEP 32u /* attempts in vain until the pauses are doubled */
#define MOST_STEPS 8u
#define NS_PER_MS 1000000L
#define NS_PER_S 1000000000L
#define FUTEX_WAIT_PRIVATE 128L
#define FUTEX_WAKE_PRIVATE 129L
#define PR_SET_NAME 15L

struct moment {
    long seconds, ns;
};

/* If no thread can be created, the agent has none. */
static __attribute__((noinline)) void begin(struct python_turns *turns) {
    unsigned long attributes[ATTRIBUTES_BYTES / sizeof(unsigned long)];
    unsigned long thread;
    turns->thread = turns->awaited != 0 ? 0 : (unsigned int)system_call(SYS_GETTID, 0, 0, 0, 0);
    turns->process = (unsigned int)own_process();
    if (turns->attributes(attributes) == 0 && turns->stack(attributes, STACK_BYTES) == 0) {
        (void)turns->create(&thread, attributes, turns->code, &turns->as_thread);
    }
}

static __attribute__((noinline)) void end(struct python_turns *turns) {
    turns->over = 1;
    turns->rest = 0;
    (void)system_call(SYS_FUTEX, (long)&turns->rest, FUTEX_WAKE_PRIVATE, 1, 0);
}

/* Sleeps until *word differs from `value`, `ns` at most. */
static void sleep_while(const volatile void *word, int value, long ns) {
    const struct moment limit = {ns / NS_PER_S, ns % NS_PER_S};
    (void)system_call(SYS_FUTEX, (long)word, FUTEX_WAIT_PRIVATE, value, ns < 0 ? 0 : (long)&limit);
}

/* Processor time of the agent's thread; 0 if it has ended. */
static unsigned long cpu_ns(const struct python_turns *turns) {
    const unsigned int thread = turns->thread;
    struct moment time = {0, 1}; /* before it runs */
    if (thread != 0) {
        time.ns = 0;
        (void)system_call(SYS_CLOCK_GETTIME, ~(long)thread * 8 + 6, (long)&time, 0, 0);
    }
    return (unsigned long)(time.seconds * NS_PER_S + time.ns);
}

static void ask(struct python_turns *turns) {
    __atomic_store_n(&turns->queueing, 1, __ATOMIC_SEQ_CST); /* the writer of `over` reads `queueing` next */
    if (__atomic_load_n(&turns->over, __ATOMIC_SEQ_CST) == 0 && turns->queued == 0 && turns->initialised() != 0) {
        turns->queued = 1;
        if (turns->queue(turns->interpreter(), turns->code, &turns->as_call, MAIN_THREAD_ONLY) != 0) {
            turns->queued = 0; /* the queue is full */
        }
    }
    __atomic_store_n(&turns->queueing, 0, __ATOMIC_SEQ_CST);
}

/* How long to sleep before the agent is checked, -1: until it asks. `slept`: the rest that has been slept through. */
static inline long pause_ns(int rest, int slept, unsigned int in_vain) {
    const unsigned int steps = in_vain / TRIES_A_STEP;
    if (rest < 0) {
        return -1;
    }
    return rest != 0 && rest != slept ? (rest >> 1) * NS_PER_MS
                                      : TURN_MS * NS_PER_MS << (steps < MOST_STEPS ? steps : MOST_STEPS);
}

static __attribute__((noinline)) void take_care(struct python_turns *turns) {
    volatile unsigned long name[2] = {0x742d6f74656e696bul, 0x736e7275ul}; /* "kineto-turns" */
    unsigned long resting_ns = 0; /* processor time when the rest was first seen */
    unsigned int in_vain = 0;
    int slept = 0;
    turns->own = system_call(SYS_GETTID, 0, 0, 0, 0);
    (void)turns->detach(turns->self());
    (void)system_call(SYS_PRCTL, PR_SET_NAME, (long)name, 0, 0);
    while (turns->over == 0) {
        const int rest = turns->rest;
        const int begins = rest != 0 && rest != slept;
        resting_ns = begins ? cpu_ns(turns) : resting_ns;
        sleep_while(&turns->rest, rest, pause_ns(rest, slept, in_vain));
        const unsigned long now_ns = cpu_ns(turns);
        if (now_ns == 0) {
            return;
        }
        /* After a rest it may have to wait before it can report the end: it has run for a moment then. */
        const int woke = rest == 0 || now_ns != resting_ns;
        const int stands = !begins && rest == turns->rest && woke && now_ns - turns->cpu_ns < WORKS_NS;
        slept = rest;
        turns->cpu_ns = now_ns;
        in_vain = stands ? in_vain + 1 : 0;
        if (stands) {
            ask(turns);
        }
    }
}

/* On a thread of the program, which has the GIL. */
static __attribute__((noinline)) void give_away(struct python_turns *turns) {
    const int wanted = turns->over == 0 && cpu_ns(turns) - turns->cpu_ns < WORKS_NS;
    turns->queued = 0;
    if (wanted && own_process() == (long)turns->process) {
        void *state = turns->release();
        sleep_while(&turns->process, (int)turns->process, PAUSE_NS);
        turns->restore(state);
        turns->handed++;
    }
}
