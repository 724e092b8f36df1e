/* A libcuda whose exported functions are built as those of driver 580 (x86-64): each calls its implementation through a
 * pointer in the library's data. It has a queue of work that takes time, contexts, events and captures of streams.
 *
 * cuCtxRecordEvent ends every capture in progress, as the real one does. The legacy stream says 906 while a stream that
 * blocks (a handle below 0x1000) is captured. A capture that is not relaxed ends on the thread that began it alone.
 * A launch has n, n + 1, … n + 9 and a pointer to nanoseconds as its arguments: so much work it puts into the queue.
 * Without FAKE_CTX_RECORD it is older than CUDA 12.5.
 */
#define _GNU_SOURCE
#include "fake_driver.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#define CAPTURES 64
enum { SUCCESS = 0, INVALID = 400, NOT_READY = 600, LOST = 901, IN_CAPTURE = 900, IMPLICIT = 906, WRONG_THREAD = 908 };
enum { RELAXED = 2, LEGACY = 1, PER_THREAD = 2, BLOCKING_BELOW = 0x1000, PRIMARY_MOST = 2, NOT_INITIALIZED = 3 };

struct event {
    int64_t done_ns;
    void *context;
    struct event *next;
};

static atomic_int settings[FAKE_SETTINGS];
static atomic_int blocked;
static atomic_uint harmed, garbled, launched, recorded, stale;
static int (*_Atomic is_held)(void);
static _Thread_local void *current;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all below */
static int64_t idle_ns;
static struct event *events;
static void *destroyed[CAPTURES]; /* the last contexts that were; their events end with them, and are kept */
static unsigned destroyed_count;
static struct {
    uintptr_t stream;
    pthread_t thread;
    int mode;
    bool lost;
} captures[CAPTURES];

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void block_while(enum fake_driver_setting setting) {
    while (atomic_load(&settings[setting]) != 0) {
        atomic_store(&blocked, 1);
        nanosleep(&(struct timespec){0, 500000}, NULL);
    }
    atomic_store(&blocked, 0);
}

void fake_driver_set(enum fake_driver_setting setting, int value) { atomic_store(&settings[setting], value); }
int fake_driver_blocked(void) { return atomic_load(&blocked); }
unsigned fake_driver_harmed(void) { return atomic_load(&harmed); }
unsigned fake_driver_garbled(void) { return atomic_load(&garbled); }
unsigned fake_driver_launched(void) { return atomic_load(&launched); }
unsigned fake_driver_recorded(void) { return atomic_load(&recorded); }
unsigned fake_driver_stale(void) { return atomic_load(&stale); }
void fake_driver_is_held(int (*held)(void)) { atomic_store(&is_held, held); }

/* As for the lock that launches share. */
static void starve(void) {
    int (*const held)(void) = atomic_load(&is_held);
    while (atomic_load(&settings[FAKE_STARVED]) != 0 && !(held != NULL && held())) {
        nanosleep(&(struct timespec){0, 500000}, NULL);
    }
}

/* ---- what needs no pointer ---- */

int cuDeviceGetCount(int *count) {
    *count = 2;
    return atomic_load(&settings[FAKE_CONTEXTS]) < 0 ? NOT_INITIALIZED : SUCCESS;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = device < atomic_load(&settings[FAKE_CONTEXTS]);
    return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    starve();
    block_while(FAKE_BLOCK_RETAIN);
    *context = (void *)(uintptr_t)(device + 1);
    return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    starve();
    return device < 2 ? SUCCESS : INVALID;
}

static bool is_other(const void *context) { return (uintptr_t)context > PRIMARY_MOST; }

/* With the lock. */
static bool exists(const void *context) {
    for (unsigned i = 0; i < CAPTURES; i++) {
        if (context != NULL && destroyed[i] == context) {
            atomic_fetch_add(&stale, 1);
            return false;
        }
    }
    return context != NULL;
}

int cuCtxSetCurrent(void *context) {
    pthread_mutex_lock(&lock);
    const bool known = exists(context);
    current = known ? context : NULL;
    pthread_mutex_unlock(&lock);
    return known ? SUCCESS : INVALID;
}

int cuCtxGetCurrent(void **context) {
    *context = current;
    return SUCCESS;
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
    *mode = 0;
    return SUCCESS;
}

int cuEventCreate(void **event, unsigned flags) {
    (void)flags;
    starve();
    block_while(FAKE_BLOCK_CREATE);
    struct event *made = calloc(1, sizeof *made);
    pthread_mutex_lock(&lock);
    *made = (struct event){.context = current, .next = events};
    events = made;
    *event = made;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int cuEventDestroy_v2(void *event) {
    starve();
    pthread_mutex_lock(&lock);
    struct event **at = &events;
    while (*at != event) {
        at = &(*at)->next;
    }
    *at = ((struct event *)event)->next;
    pthread_mutex_unlock(&lock);
    free(event);
    return SUCCESS;
}

int cuEventQuery(void *event) {
    const struct event *asked = event;
    const bool never = atomic_load(&settings[FAKE_NEVER]) != 0 ||
                       (is_other(asked->context) && atomic_load(&settings[FAKE_OTHER_NEVER]) != 0);
    pthread_mutex_lock(&lock);
    const bool known = exists(asked->context);
    const int64_t done_ns = asked->done_ns;
    pthread_mutex_unlock(&lock);
    return !known ? INVALID : now_ns() >= done_ns && !(never && done_ns != 0) ? SUCCESS : NOT_READY;
}

int cuStreamIsCapturing(void *stream, int *status) {
    int result = SUCCESS;
    *status = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < CAPTURES; i++) {
        if (captures[i].stream != 0 && (uintptr_t)stream == LEGACY && captures[i].stream < BLOCKING_BELOW) {
            result = IMPLICIT;
        }
        *status = captures[i].stream == (uintptr_t)stream && captures[i].stream != 0 ? 1 : *status;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

#ifdef FAKE_CTX_RECORD
int cuCtxRecordEvent(void *context, void *event) {
    int result = SUCCESS;
    (void)context;
    block_while(FAKE_BLOCK_RECORD);
    int (*const held)(void) = atomic_load(&is_held);
    if (held != NULL && held()) {
        block_while(FAKE_BLOCK_HELD);
    }
    starve();
    pthread_mutex_lock(&lock);
    for (int i = 0; i < CAPTURES; i++) {
        if (captures[i].stream != 0) {
            atomic_fetch_add(&harmed, captures[i].lost ? 0 : 1);
            captures[i].lost = true;
            result = IN_CAPTURE;
        }
    }
    const int64_t now = now_ns();
    const int64_t steady_ns = now + atomic_load(&settings[FAKE_STEADY_MS]) * 1000000LL;
    ((struct event *)event)->done_ns = steady_ns > idle_ns ? steady_ns : idle_ns;
    atomic_fetch_add(&recorded, 1);
    pthread_mutex_unlock(&lock);
    return result;
}
#endif

/* ---- what has one ---- */

static int begin(uintptr_t stream, int mode) {
    int result = INVALID;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < CAPTURES && result != SUCCESS; i++) {
        if (captures[i].stream == 0) {
            captures[i].stream = stream;
            captures[i].thread = pthread_self();
            captures[i].mode = mode;
            captures[i].lost = false;
            result = SUCCESS;
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static int end(uintptr_t stream, void **graph) {
    int result = INVALID;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < CAPTURES; i++) {
        const bool began = captures[i].stream != 0 && pthread_equal(captures[i].thread, pthread_self());
        if (captures[i].stream == stream && stream != 0 && (stream != PER_THREAD || began)) {
            const bool may = captures[i].mode == RELAXED || began;
            result = !may ? WRONG_THREAD : captures[i].lost ? LOST : SUCCESS;
            captures[i].stream = may ? 0 : stream;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    *graph = NULL;
    return result;
}

static uintptr_t per_thread(uintptr_t stream) { return stream == 0 ? PER_THREAD : stream; }

static int begin_v1(uintptr_t stream) { return begin(stream, 0); }
static int begin_v2(uintptr_t stream, int mode) { return begin(stream, mode); }
static int begin_v2_ptsz(uintptr_t stream, int mode) { return begin(per_thread(stream), mode); }
static int begin_to(uintptr_t stream, void *graph, const void *nodes, const void *edges, size_t count, int mode) {
    return graph == (void *)7 && nodes == (void *)8 && edges == (void *)9 && count == 10 ? begin(stream, mode)
                                                                                         : INVALID;
}
static int end_v1(uintptr_t stream, void **graph) { return end(stream, graph); }
static int end_ptsz(uintptr_t stream, void **graph) { return end(per_thread(stream), graph); }

static void queue(int64_t ns) {
    pthread_mutex_lock(&lock);
    const int64_t now = now_ns();
    idle_ns = (idle_ns > now ? idle_ns : now) + ns;
    pthread_mutex_unlock(&lock);
    atomic_fetch_add(&launched, 1);
}

/* The last argument is where the nanoseconds are. */
static int launch(uintptr_t a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f, unsigned g, unsigned h,
                  uintptr_t i, uintptr_t j, const int64_t *ns) {
    const bool intact = b == a + 1 && c == a + 2 && d == a + 3 && e == a + 4 && f == a + 5 && g == a + 6 &&
                        h == a + 7 && i == a + 8 && j == a + 9;
    atomic_fetch_add(&garbled, intact ? 0 : 1);
    queue(__atomic_load_n(ns, __ATOMIC_SEQ_CST));
    return SUCCESS;
}

static int destroy(void *context) {
    pthread_mutex_lock(&lock);
    destroyed[destroyed_count++ % CAPTURES] = context;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

static int launch_graph(const int64_t *ns, uintptr_t stream) {
    atomic_fetch_add(&garbled, stream == 0x2000 ? 0 : 1);
    queue(__atomic_load_n(ns, __ATOMIC_SEQ_CST));
    return SUCCESS;
}

/* As driver 580 begins and ends each of them; `arguments` hands those on the stack on. */
#define ENTRY(name, implementation, arguments)                                                               \
    __attribute__((visibility("hidden"), used)) void *volatile slot_##name = (void *)(implementation);       \
    __asm__(".text\n.balign 16\n.globl " #name "\n.type " #name ", @function\n" #name ":\n"                  \
            "push %rbp; mov %rsp, %rbp; push %r12; sub $0x28, %rsp\n"                                        \
            "cmpl $0x321cba00, fake_driver_ended(%rip); mov $4, %eax; je 1f\n" arguments "call *slot_" #name \
            "(%rip)\n"                                                                                       \
            "mov %eax, %r12d; test %eax, %eax; mov %r12d, %eax\n"                                            \
            "1: lea -8(%rbp), %rsp; pop %r12; pop %rbp; ret\n.size " #name ", .-" #name "\n");

__attribute__((visibility("hidden"), used)) uint32_t fake_driver_ended;

#define ON_STACK                                                                                         \
    "mov 0x18(%rbp), %eax; sub $8, %rsp; push 0x30(%rbp); push 0x28(%rbp); push 0x20(%rbp); push %rax\n" \
    "mov 0x10(%rbp), %eax; push %rax\n"

// clang-format off: a row for each function
#define ENTRIES(X)                                           \
    X(cuStreamBeginCapture, begin_v1, "")                    \
    X(cuStreamBeginCapture_v2, begin_v2, "")                 \
    X(cuStreamBeginCapture_v2_ptsz, begin_v2_ptsz, "")       \
    X(cuStreamBeginCaptureToGraph, begin_to, "")             \
    X(cuStreamEndCapture, end_v1, "")                        \
    X(cuStreamEndCapture_ptsz, end_ptsz, "")                 \
    X(cuLaunchKernel, launch, ON_STACK)                      \
    X(cuGraphLaunch, launch_graph, "")                       \
    X(cuCtxDestroy_v2, destroy, "")
// clang-format on
ENTRIES(ENTRY)

#define IS_OWN(name, implementation, arguments) \
    &&__atomic_load_n(&slot_##name, __ATOMIC_SEQ_CST) == (void *)(implementation)

int fake_driver_intact(void) { return 1 ENTRIES(IS_OWN); }
