/* See launches.h.
 *
 * Theory of operation
 *   CUPTI's first call takes 10 to 19 ms and waits for the device at its end. A program that queues a second of work at
 *   a time has done so by then, and its launches wait for that second (measured: 62 to 824 ms). If they are held back
 *   during the call, they wait for the call only.
 *
 *   The call needs a lock of the driver exclusively, which launches share. Eight threads that launch without a pause
 *   leave it no gap, and most of them get stuck behind it (64 threads on an H200: 57 stood still for good; with
 *   launches held, the call took 12 to 17 ms). So launches are held where several threads launch at once, and while
 *   cuptiFinalize runs. A thread that holds the lock may have lost its CPU: where ten times as many threads ran as there
 *   are processors, 30 ms were too short and the program stood still for good. So longer and longer pauses follow.
 *
 *   It waits for the work of every context. Primary ones can be asked for; nothing lists those of cuCtxCreate, so they
 *   are noted when something is launched into them: by the interposed functions until CUPTI is called, by CUPTI's
 *   callbacks afterwards. A thread that destroys a context removes its note first, and waits while we use it.
 *
 *   A launch has more arguments than fit in registers, so the interposed code preserves all registers and jumps.
 *
 * Threads: the interposed functions and context_note run on the thread that launches or destroys; the rest on ours.
 * Blocks: a launch waits for the hold that it meets, until its limit; a later launch may meet the next one. A thread that
 *   destroys a context while we use it waits microseconds, DESTROY_NS at most. context_note never does.
 */
#define _GNU_SOURCE
#include "cupti/launches.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

#include "common/wake.h"
#include "cupti/driver_slots.h"

#if defined(__x86_64__)

#define DESTROY_NS 20000000LL
#define PAUSE_NS 10000000LL
#define PAUSE_MOST_NS 320000000LL
#define PAUSES_IN_VAIN 3
#define LOOK_NS 250000L
#define CROWD 3
#define LAUNCHES 8
#define DESTROYS 2

static const char *const NAMES[LAUNCHES] = {
    "cuLaunchKernel", "cuLaunchKernel_ptsz", "cuLaunchKernelEx",          "cuLaunchKernelEx_ptsz",
    "cuGraphLaunch",  "cuGraphLaunch_ptsz",  "cuLaunchCooperativeKernel", "cuLaunchCooperativeKernel_ptsz"};
static const char *const DESTROY_NAMES[DESTROYS] = {"cuCtxDestroy_v2", "cuCtxDestroy"};

typedef int (*get_current)(void **);

static struct {
    int64_t until_ns; /* 0: launches are not held */
    struct wake released;
    _Atomic uint32_t waiting;     /* number of threads */
    _Atomic(get_current) current; /* cuCtxGetCurrent */
} hold;

static struct {
    struct {
        _Atomic(void *) handle;
        _Atomic uint32_t generation; /* how many contexts this entry has held before */
    } noted[CONTEXTS_NOTED];
    _Atomic uint32_t entered; /* number of an entry, from 1 on; 0: none */
    struct wake left;
    _Atomic bool watched; /* the end of each context is noticed */
    struct in_between destroys[DESTROYS];
} contexts;

/* Named in the assembly below. */
__attribute__((visibility("hidden"), used)) struct in_between kineto_launches[LAUNCHES];
__attribute__((visibility("hidden"), used)) void kineto_launch_begins(void);

/* ---- contexts ---- */

void context_note(void *context) {
    if (context == NULL || !atomic_load_explicit(&contexts.watched, memory_order_relaxed)) {
        return;
    }
    for (uint32_t i = 0; i < CONTEXTS_NOTED; i++) {
        void *seen = atomic_load_explicit(&contexts.noted[i].handle, memory_order_relaxed);
        if (seen == context ||
            (seen == NULL &&
             (atomic_compare_exchange_strong(&contexts.noted[i].handle, &seen, context) || seen == context))) {
            return;
        }
    }
}

void *context_noted(uint32_t entry, uint32_t *generation) {
    *generation = atomic_load(&contexts.noted[entry].generation);
    return atomic_load(&contexts.noted[entry].handle);
}

bool context_enter(uint32_t entry, uint32_t generation) {
    atomic_store(&contexts.entered, entry + 1);
    if (atomic_load(&contexts.noted[entry].generation) == generation) {
        return true;
    }
    context_leave();
    return false;
}

void context_leave(void) {
    atomic_store(&contexts.entered, 0);
    wake_post(&contexts.left);
}

static void destroyed(uint32_t entry) {
    atomic_store(&contexts.noted[entry].handle, NULL); /* before: a reader of the new generation reads no old handle */
    atomic_fetch_add(&contexts.noted[entry].generation, 1);
}

static int destroy_through(uint32_t which, void *context) {
    for (uint32_t i = 0; i < CONTEXTS_NOTED; i++) {
        if (context != NULL && atomic_load(&contexts.noted[i].handle) == context) {
            destroyed(i);
            if (atomic_load(&contexts.entered) == i + 1) {
                (void)wake_await(&contexts.left, (const uint32_t *)&contexts.entered, 0, DESTROY_NS);
            }
        }
    }
    int (*original)(void *);
    *(void **)&original = in_between_original(&contexts.destroys[which]);
    return original(context);
}

static int destroy_0(void *context) { return destroy_through(0, context); }
static int destroy_1(void *context) { return destroy_through(1, context); }
static int (*const OUR_DESTROYS[DESTROYS])(void *) = {destroy_0, destroy_1};

void contexts_watch(void *cuda) {
    bool all = true;
    for (uint32_t i = 0; i < DESTROYS; i++) {
        uint8_t *function = dlsym(cuda, DESTROY_NAMES[i]);
        struct in_between *between = &contexts.destroys[i];
        void *ours = *(void *const *)&OUR_DESTROYS[i];
        between->slot = driver_slot(function);
        const bool again = i > 0 && between->slot == contexts.destroys[0].slot; /* both have one implementation */
        if (function != NULL && !again && (between->slot == NULL || !in_between_may(between, ours))) {
            all = false;
            between->slot = NULL;
        } else if (between->slot != NULL && !again) {
            in_between_place(between, ours);
        } else {
            between->slot = NULL;
        }
    }
    atomic_store(&contexts.watched, all);
}

void contexts_forget(void) {
    atomic_store(&contexts.watched, false);
    for (uint32_t i = 0; i < DESTROYS; i++) {
        in_between_remove(&contexts.destroys[i], *(void *const *)&OUR_DESTROYS[i]);
    }
    for (uint32_t i = 0; i < CONTEXTS_NOTED; i++) {
        destroyed(i);
    }
}

/* ---- launches ---- */

void kineto_launch_begins(void) {
    void *context = NULL;
    const get_current current = atomic_load(&hold.current);
    if (current(&context) == 0) {
        context_note(context);
    }
    const int64_t held = launches_held_until_ns();
    if (held != 0) {
        atomic_fetch_add(&hold.waiting, 1);
        for (int64_t left = 1; left > 0 && launches_held_until_ns() == held;) { /* not for the hold after that */
            const uint32_t seen = wake_seen(&hold.released);
            left = held - clock_ns(CLOCK_MONOTONIC);
            if (launches_held_until_ns() == held) {
                wake_wait(&hold.released, seen, left);
            }
        }
        atomic_fetch_sub(&hold.waiting, 1);
    }
}

/* The original is the second of two pointers in a struct in_between. */
#define IN_BETWEEN(number)                                                                   \
    __attribute__((naked)) static void in_##number(void) {                                   \
        __asm__("push %rdi; push %rsi; push %rdx; push %rcx; push %r8; push %r9; push %rax;" \
                "call kineto_launch_begins;"                                                 \
                "pop %rax; pop %r9; pop %r8; pop %rcx; pop %rdx; pop %rsi; pop %rdi;"        \
                "jmp *kineto_launches+16*" #number "+8(%rip)");                              \
    }
IN_BETWEEN(0)
IN_BETWEEN(1)
IN_BETWEEN(2)
IN_BETWEEN(3)
IN_BETWEEN(4)
IN_BETWEEN(5)
IN_BETWEEN(6)
IN_BETWEEN(7)

static void (*const OURS[LAUNCHES])(void) = {in_0, in_1, in_2, in_3, in_4, in_5, in_6, in_7};

void launches_watch(void *cuda) {
    get_current current = NULL;
    if (cuda != NULL) {
        *(void **)&current = dlsym(cuda, "cuCtxGetCurrent");
    }
    if (current == NULL) {
        return;
    }
    atomic_store(&hold.current, current);
    for (uint32_t i = 0; i < LAUNCHES; i++) {
        void *ours = *(void *const *)&OURS[i];
        kineto_launches[i].slot = driver_slot(dlsym(cuda, NAMES[i]));
        if (kineto_launches[i].slot != NULL && in_between_may(&kineto_launches[i], ours)) {
            in_between_place(&kineto_launches[i], ours);
        }
    }
}

int64_t launches_hold(int64_t limit_ns) {
    const int64_t until_ns = clock_ns(CLOCK_MONOTONIC) + limit_ns;
    __atomic_store_n(&hold.until_ns, until_ns, __ATOMIC_SEQ_CST);
    return until_ns;
}

int64_t launches_held_until_ns(void) { return __atomic_load_n(&hold.until_ns, __ATOMIC_SEQ_CST); }

bool launches_are_held(void) { return launches_held_until_ns() > clock_ns(CLOCK_MONOTONIC); }

uint32_t launches_waiting(void) { return atomic_load(&hold.waiting); }

bool launches_crowd(void) { return launches_waiting() >= CROWD; }

void launches_release(int64_t held) {
    if (__atomic_compare_exchange_n(&hold.until_ns, &held, 0, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        wake_post(&hold.released);
    }
}

/* Returns 0 if somebody else has come first. */
static int64_t hold_unless_held(int64_t limit_ns) {
    const int64_t now = clock_ns(CLOCK_MONOTONIC), until_ns = now + limit_ns;
    int64_t found = launches_held_until_ns();
    const bool ours = found <= now && __atomic_compare_exchange_n(&hold.until_ns, &found, until_ns, false,
                                                                  __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return ours ? until_ns : 0;
}

void launches_pause(struct launch_pauses *pauses, bool (*is_over)(void *), void *argument) {
    const struct timespec look = {0, LOOK_NS};
    const int64_t length_ns = pauses->length_ns == 0 ? PAUSE_NS : pauses->length_ns;
    const int64_t held = pauses->in_vain < PAUSES_IN_VAIN ? hold_unless_held(length_ns) : 0;
    bool crowd = false; /* seen during the hold: they leave when it ends, before we look */
    if (held == 0) {
        return;
    }
    while (!is_over(argument) && clock_ns(CLOCK_MONOTONIC) < held) {
        (void)nanosleep(&look, NULL);
        crowd = crowd || launches_crowd();
    }
    launches_release(held);
    if (is_over(argument)) {
        *pauses = (struct launch_pauses){0, 0};
    } else if (length_ns >= PAUSE_MOST_NS) {
        pauses->in_vain = PAUSES_IN_VAIN; /* the call waits for something else */
    } else if (crowd) {
        *pauses = (struct launch_pauses){2 * length_ns, 0};
    } else {
        pauses->in_vain++;
    }
}

void launches_leave(void) {
    launches_release(launches_held_until_ns());
    for (uint32_t i = LAUNCHES; i-- > 0;) { /* two names may lead to one slot */
        in_between_remove(&kineto_launches[i], *(void *const *)&OURS[i]);
    }
}

#else /* no decoder for this architecture */

void contexts_watch(void *cuda) { (void)cuda; }
void launches_watch(void *cuda) { (void)cuda; }
int64_t launches_hold(int64_t limit_ns) { return limit_ns; }
bool launches_are_held(void) { return false; }
int64_t launches_held_until_ns(void) { return 0; }
uint32_t launches_waiting(void) { return 0; }
bool launches_crowd(void) { return false; }
void launches_pause(struct launch_pauses *pauses, bool (*is_over)(void *), void *argument) {
    (void)pauses, (void)is_over, (void)argument;
}
void launches_release(int64_t held) { (void)held; }
void launches_leave(void) {}
void context_note(void *context) { (void)context; }
void *context_noted(uint32_t entry, uint32_t *generation) {
    *generation = entry;
    return NULL;
}
bool context_enter(uint32_t entry, uint32_t generation) { return entry == generation; }
void context_leave(void) {}
void contexts_forget(void) {}

#endif
