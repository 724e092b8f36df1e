/* See device_drain.h.
 *
 * Theory of operation
 *   The first call of CUPTI in a process, and cuptiFinalize, return when everything on the device is done, and until then
 *   the program's launches wait with them (measured on H200s with driver 580: 2.8 s of a kernel of 3 s; a kernel that
 *   does not end stops the program for good). So it must be known before that the work ends soon.
 *
 *   cuCtxRecordEvent marks all the work of a context that is queued now, and cuEventQuery tells when that is done; neither
 *   waits. One event after the other is recorded. If one is done within SHORT_NS, the device is all but empty: that is
 *   the moment. Where the queue never gets that short (a loop that computes all the time), the time that an event took
 *   says how long the wait will be.
 *
 *   To record such an event ends the captures of the program that are in progress, so it is recorded only where none can
 *   be: those that begin now are noted (capture_gate.c). Those that began before are looked for: on streams that block
 *   by the legacy stream, which says so without harm, and on torch's pools of streams by asking each (where torch has
 *   made them: making them takes 70 MiB of the device's memory). What is left, captures on streams of other libraries,
 *   has SETTLE_NS to end.
 *
 *   A call of the driver waits where another thread holds the driver's lock while the device is busy (cuMemFree does).
 *   So a thread of its own makes them, and is left alone where it does not answer in time. It is asked for its answer
 *   again the next time.
 *
 *   Only primary contexts are known, which all of CUDA's runtime uses. CUPTI waits for others, too; the program's
 *   launches into the primary one go on then (20 ms in place of 2,670).
 *
 * Threads: drain_await and drain_end on the agent's; one thread of its own, with signals blocked.
 * Blocks: drain_await up to its patience and ANSWER_NS. The thread of its own blocks inside the driver.
 */
#define _GNU_SOURCE
#include "cupti/device_drain.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "common/own_threads.h"
#include "common/wake.h"
#include "cupti/capture_gate.h"

#define SHORT_NS 3000000LL
#define LOOK_NS 250000L          /* between two looks at an event */
#define SETTLE_NS 100000000LL    /* a capture takes milliseconds, but for those of large graphs */
#define STEADY_NS 200000000LL    /* so long at least is looked for a shorter queue, */
#define STEADY_TIMES 4           /* and for so many times the length of the queue */
#define ANSWER_NS 200000000LL    /* for calls of the driver that wait for locks of its own */
#define STACK_BYTES (512u << 10) /* a program may lock all its memory */
#define CONTEXTS_MOST 16
#define POOL_STREAMS 32u /* of each of torch's two pools of a device */
#define LEGACY_STREAM ((void *)1)
enum { SUCCESS = 0, NOT_READY = 600, EVENT_DISABLE_TIMING = 2, CAPTURE_MODE_RELAXED = 2, CAPTURE_IMPLICIT = 906 };

struct torch_stream { /* c10::cuda::CUDAStream */
    int64_t words[2];
};

// clang-format off: a row for each function
#define DRIVER_FUNCTIONS(X)                                                        \
    X(device_count, "cuDeviceGetCount", (int *))                                   \
    X(primary_state, "cuDevicePrimaryCtxGetState", (int, unsigned *, int *))       \
    X(retain, "cuDevicePrimaryCtxRetain", (void **, int))                          \
    X(release, "cuDevicePrimaryCtxRelease_v2", (int))                              \
    X(set_current, "cuCtxSetCurrent", (void *))                                    \
    X(exchange_mode, "cuThreadExchangeStreamCaptureMode", (int *))                 \
    X(event_create, "cuEventCreate", (void **, unsigned))                          \
    X(event_destroy, "cuEventDestroy_v2", (void *))                                \
    X(event_query, "cuEventQuery", (void *))                                       \
    X(is_capturing, "cuStreamIsCapturing", (void *, int *))                        \
    X(record, "cuCtxRecordEvent", (void *, void *)) /* CUDA 12.5 */
// clang-format on

struct driver {
    void *library;
#define FIELD(field, name, parameters) int(*field) parameters;
    DRIVER_FUNCTIONS(FIELD)
#undef FIELD
};

struct context {
    int device;
    void *handle;
    void *anchor; /* event that stays until it is done */
    void *probe;  /* event that is recorded anew */
};

/* One question. Whoever is the last to need it frees it. */
struct question {
    int64_t limit_ns, patience_ns;
    bool torch_pools;
    struct driver driver;
    struct context contexts[CONTEXTS_MOST];
    int count;
    void *pool[2 * POOL_STREAMS * CONTEXTS_MOST]; /* of torch, that were captured when we came */
    uint32_t pool_count;
    int64_t begun_ns;
    uint32_t answered;
    uint32_t users;
    struct kc_drain_result result;
};

static struct {
    struct question *unanswered; /* since an earlier call */
    struct wake wake;
    uint32_t hurried;
    bool gated;
    int64_t gated_ns;
} self;

static int64_t now_ns(void) { return clock_ns(CLOCK_MONOTONIC); }

static void pause_ns(long ns) {
    const struct timespec pause = {0, ns};
    (void)nanosleep(&pause, NULL);
}

static void let_go(struct question *question) {
    if (__atomic_sub_fetch(&question->users, 1, __ATOMIC_SEQ_CST) == 0) {
        free(question);
    }
}

/* ---- the thread of its own ---- */

static int each_context(struct question *question, int (*call)(struct question *, struct context *)) {
    for (int i = 0; i < question->count; i++) {
        const int result = question->driver.set_current(question->contexts[i].handle);
        const int code = result != SUCCESS ? result : call(question, &question->contexts[i]);
        if (code != SUCCESS) {
            return code;
        }
    }
    return SUCCESS;
}

static int make_events(struct question *question, struct context *context) {
    const int made = question->driver.event_create(&context->anchor, EVENT_DISABLE_TIMING);
    return made != SUCCESS ? made : question->driver.event_create(&context->probe, EVENT_DISABLE_TIMING);
}

static int destroy_events(struct question *question, struct context *context) {
    if (context->anchor != NULL) {
        (void)question->driver.event_destroy(context->anchor);
    }
    if (context->probe != NULL) {
        (void)question->driver.event_destroy(context->probe);
    }
    return SUCCESS;
}

static int legacy_stream(struct question *question, struct context *context) {
    int capturing = 0;
    (void)context;
    return question->driver.is_capturing(LEGACY_STREAM, &capturing);
}

static int record_anchor(struct question *question, struct context *context) {
    return question->driver.record(context->handle, context->anchor);
}

static int record_probe(struct question *question, struct context *context) {
    return question->driver.record(context->handle, context->probe);
}

static int query_anchor(struct question *question, struct context *context) {
    return question->driver.event_query(context->anchor);
}

static int query_probe(struct question *question, struct context *context) {
    return question->driver.event_query(context->probe);
}

static bool pool_captured(struct question *question) {
    while (question->pool_count > 0) {
        int capturing = 0;
        const int code = question->driver.is_capturing(question->pool[question->pool_count - 1], &capturing);
        if (code != SUCCESS || capturing != 0) {
            return true;
        }
        question->pool_count--;
    }
    return false;
}

/* CAPTURE_IMPLICIT: a capture may be in progress, nothing was recorded. */
static int record_if_free(struct question *question, int (*record)(struct question *, struct context *)) {
    if (now_ns() - self.gated_ns < SETTLE_NS || pool_captured(question) || !capture_gate_enter()) {
        return CAPTURE_IMPLICIT;
    }
    const int free_of_captures = each_context(question, legacy_stream);
    const int code = free_of_captures != SUCCESS ? free_of_captures : each_context(question, record);
    capture_gate_leave();
    return code;
}

struct progress {
    bool pending;      /* an anchor is */
    int64_t anchor_ns; /* when it was recorded */
    int64_t done_ns;   /* how long the last one that was done has taken; -1: none was */
    bool recorded;     /* an event was */
};

/* One look: whether there is an answer. An error of the driver is one. */
static bool look(struct question *question, struct progress *progress) {
    struct kc_drain_result *result = &question->result;
    if (!progress->pending) {
        const int code = record_if_free(question, record_anchor);
        progress->pending = code == SUCCESS;
        progress->anchor_ns = now_ns();
        if (code != SUCCESS && code != CAPTURE_IMPLICIT) {
            result->outcome = KC_DRAIN_UNKNOWN;
            result->code = code;
            return true;
        }
    }
    if (record_if_free(question, record_probe) == SUCCESS) {
        progress->recorded = true;
        const int64_t begin = now_ns();
        do {
            if (each_context(question, query_probe) == SUCCESS) {
                result->outcome = KC_DRAIN_SHORT;
                return true;
            }
            pause_ns(LOOK_NS);
        } while (now_ns() - begin < SHORT_NS);
    } else {
        pause_ns(LOOK_NS);
    }
    if (progress->pending && each_context(question, query_anchor) != NOT_READY) {
        progress->done_ns = now_ns() - progress->anchor_ns;
        progress->pending = false;
    }
    const int64_t now = now_ns();
    const int64_t steady = STEADY_TIMES * progress->done_ns > STEADY_NS ? STEADY_TIMES * progress->done_ns : STEADY_NS;
    const bool over = now - question->begun_ns >= question->patience_ns;
    const int64_t waiting = progress->pending ? now - progress->anchor_ns : 0;
    const bool soon = progress->done_ns >= 0 && progress->done_ns <= question->limit_ns &&
                      waiting <= question->limit_ns;
    if (!over && !(soon && now - question->begun_ns >= steady)) {
        return false;
    }
    result->queued_ns = (uint64_t)(progress->done_ns > waiting ? progress->done_ns : waiting);
    result->outcome = soon ? KC_DRAIN_SOON : progress->recorded ? KC_DRAIN_NOT : KC_DRAIN_CAPTURING;
    return true;
}

static void find_contexts(struct question *question) {
    int devices = 0;
    if (question->driver.device_count(&devices) != SUCCESS) {
        return; /* CUDA is not in use yet */
    }
    for (int device = 0; device < devices && question->count < CONTEXTS_MOST; device++) {
        unsigned flags = 0;
        int active = 0;
        struct context context = {.device = device};
        if (question->driver.primary_state(device, &flags, &active) == SUCCESS && active &&
            question->driver.retain(&context.handle, device) == SUCCESS) {
            question->contexts[question->count++] = context;
        }
    }
}

/* Streams of torch's pools that are captured now. They are never destroyed. A round through a pool leaves it as it was. */
static void find_captured_of_pools(struct question *question) {
    void *torch = dlopen("libc10_cuda.so", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    struct torch_stream (*from_pool)(bool, int8_t) = NULL;
    void *(*raw)(const struct torch_stream *) = NULL;
    if (torch == NULL) {
        return;
    }
    *(void **)&from_pool = dlsym(torch, "_ZN3c104cuda17getStreamFromPoolEba");
    *(void **)&raw = dlsym(torch, "_ZNK3c104cuda10CUDAStream6streamEv");
    for (int i = 0; from_pool != NULL && raw != NULL && i < question->count; i++) {
        for (uint32_t n = 0; n < 2 * POOL_STREAMS; n++) {
            const struct torch_stream stream = from_pool(n >= POOL_STREAMS, (int8_t)question->contexts[i].device);
            void *handle = raw(&stream);
            int capturing = 0;
            if (question->driver.is_capturing(handle, &capturing) == SUCCESS && capturing != 0) {
                question->pool[question->pool_count++] = handle;
            }
        }
    }
    dlclose(torch);
}

static void answer(struct question *question) {
    struct progress progress = {.done_ns = -1};
    int mode = CAPTURE_MODE_RELAXED;
    find_contexts(question);
    if (question->count == 0) {
        question->result.outcome = KC_DRAIN_SHORT; /* nothing to wait for */
        return;
    }
    (void)question->driver.exchange_mode(&mode);
    if (!self.gated) {
        self.gated = capture_gate_place(question->driver.library);
        self.gated_ns = now_ns();
        if (!self.gated) {
            question->result.outcome = KC_DRAIN_UNKNOWN;
            return;
        }
        if (question->torch_pools) {
            find_captured_of_pools(question);
        }
    }
    const int code = each_context(question, make_events);
    if (code != SUCCESS) {
        question->result.outcome = KC_DRAIN_UNKNOWN;
        question->result.code = code;
    } else {
        while (!look(question, &progress)) {
        }
    }
}

static void *ask(void *argument) {
    struct question *question = argument;
    (void)prctl(PR_SET_NAME, "kineto-drain", 0, 0, 0);
    answer(question);
    question->result.waited_ns = (uint64_t)(now_ns() - question->begun_ns);
    (void)each_context(question, destroy_events);
    for (int i = 0; i < question->count; i++) {
        (void)question->driver.release(question->contexts[i].device);
    }
    __atomic_store_n(&question->answered, 1, __ATOMIC_SEQ_CST);
    wake_post(&self.wake);
    let_go(question);
    return NULL;
}

/* ---- the agent's thread ---- */

static bool find_driver(struct driver *driver) {
    driver->library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (driver->library == NULL) {
        return false;
    }
    bool all = true;
#define FIND(field, name, parameters)                          \
    *(void **)&driver->field = dlsym(driver->library, (name)); \
    all = all && driver->field != NULL;
    DRIVER_FUNCTIONS(FIND)
#undef FIND
    dlclose(driver->library); /* it stays: CUDA is never unloaded */
    return all;
}

static bool start(struct question *question) {
    sigset_t before;
    pthread_t thread;
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) != 0) {
        return false;
    }
    (void)pthread_attr_setstacksize(&attributes, STACK_BYTES);
    (void)pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    block_signals(&before);
    const bool started = pthread_create(&thread, &attributes, ask, question) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    (void)pthread_attr_destroy(&attributes);
    return started;
}

static bool answered_within(struct question *question, int64_t limit_ns) {
    const int64_t deadline = now_ns() + limit_ns;
    for (;;) {
        const uint32_t seen = wake_seen(&self.wake);
        const int64_t left = deadline - now_ns();
        if (__atomic_load_n(&question->answered, __ATOMIC_SEQ_CST) != 0) {
            return true;
        }
        if (left <= 0 || __atomic_load_n(&self.hurried, __ATOMIC_SEQ_CST) != 0) {
            return false;
        }
        wake_wait(&self.wake, seen, left);
    }
}

void drain_hurry(void) {
    __atomic_store_n(&self.hurried, 1, __ATOMIC_SEQ_CST);
    wake_post(&self.wake);
}

static void forget_answered(void) {
    if (self.unanswered != NULL && __atomic_load_n(&self.unanswered->answered, __ATOMIC_SEQ_CST) != 0) {
        let_go(self.unanswered);
        self.unanswered = NULL;
    }
}

static void unanswered(const struct question *question, struct kc_drain_result *result) {
    result->outcome = KC_DRAIN_NOT;
    result->queued_ns = result->waited_ns = (uint64_t)(now_ns() - question->begun_ns);
}

void drain_await(int64_t limit_ns, int64_t patience_ns, bool torch_pools, struct kc_drain_result *result) {
    struct driver driver;
    memset(result, 0, sizeof *result);
    __atomic_store_n(&self.hurried, 0, __ATOMIC_SEQ_CST);
    if (self.unanswered != NULL && !answered_within(self.unanswered, patience_ns)) {
        unanswered(self.unanswered, result);
        return;
    }
    forget_answered();
    if (!find_driver(&driver)) {
        result->outcome = driver.library == NULL ? KC_DRAIN_SHORT : KC_DRAIN_UNKNOWN;
        return;
    }
    struct question *question = calloc(1, sizeof *question);
    if (question == NULL) {
        result->outcome = KC_DRAIN_UNKNOWN;
        return;
    }
    *question = (struct question){.limit_ns = limit_ns,
                                  .patience_ns = patience_ns,
                                  .torch_pools = torch_pools,
                                  .driver = driver,
                                  .begun_ns = now_ns(),
                                  .users = 2};
    if (!start(question)) {
        free(question);
        result->outcome = KC_DRAIN_UNKNOWN;
        return;
    }
    if (answered_within(question, patience_ns + ANSWER_NS)) {
        *result = question->result;
        let_go(question);
    } else {
        self.unanswered = question;
        unanswered(question, result);
    }
}

void drain_end(void) {
    forget_answered();
    if (self.gated && self.unanswered == NULL) {
        capture_gate_remove();
        self.gated = false;
    }
}

void drain_forked(void) {
    self.unanswered = NULL; /* the thread is in the parent */
    capture_gate_leave();
}
