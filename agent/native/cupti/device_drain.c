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
 *   by the legacy stream, which says so without harm, and on torch's streams by asking each. What is left, captures on
 *   streams of other libraries, has settle_ns to end.
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
#include "cupti/launch_hold.h"

#define SHORT_NS 3000000LL
#define LOOK_NS 250000L          /* between two looks at an event */
#define STEADY_NS 200000000LL    /* so long at least is looked for a shorter queue, */
#define STEADY_TIMES 4           /* and for so many times the length of the queue */
#define ANSWER_NS 200000000LL    /* for calls of the driver that wait for locks of its own */
#define STACK_BYTES (512u << 10) /* a program may lock all its memory */
#define CONTEXTS_MOST 16
#define STREAMS_MOST 1024u
#define HELD_MOST_NS 100000000LL /* of launches, in vain */
#define LEGACY_STREAM ((void *)1)
enum { SUCCESS = 0, NOT_READY = 600, EVENT_DISABLE_TIMING = 2, CAPTURE_MODE_RELAXED = 2, CAPTURE_IMPLICIT = 906 };

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

enum state { ASKED, ANSWERED, GIVEN_UP /* by who asked, so the thread ends as soon as it can */ };

/* One question. Whoever is the last to need it frees it. */
struct question {
    struct drain_wish wish;
    uint64_t streams[STREAMS_MOST]; /* those of the wish, which its owner does not keep for long */
    struct driver driver;
    struct context contexts[CONTEXTS_MOST];
    int count;
    int64_t begun_ns;
    uint32_t state;
    uint32_t users;
    struct kc_drain_result result;
};

static struct {
    struct question *unanswered; /* since an earlier call */
    struct wake wake;
    uint32_t hurried;
    bool gated;
    int64_t gated_ns;
    int64_t settle_ns;
    void *captured[STREAMS_MOST]; /* streams that were captured then, and may be still */
    uint32_t captured_count;
} self;

static int64_t now_ns(void) { return clock_ns(CLOCK_MONOTONIC); }

static void pause_ns(long ns) {
    const struct timespec pause = {0, ns};
    (void)nanosleep(&pause, NULL);
}

static bool is_now(const struct question *question, uint32_t state) {
    return __atomic_load_n(&question->state, __ATOMIC_SEQ_CST) == state;
}

/* From ASKED to this. False: the other side came first. */
static bool settle(struct question *question, uint32_t state) {
    uint32_t asked = ASKED;
    return __atomic_compare_exchange_n(&question->state, &asked, state, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
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

/* A thread that was kept from running may come here when the moment is long over. */
static int record_now(struct question *question, const struct context *context, void *event) {
    return capture_gate_recording() ? question->driver.record(context->handle, event) : CAPTURE_IMPLICIT;
}

static int record_anchor(struct question *question, struct context *context) {
    return record_now(question, context, context->anchor);
}

static int record_probe(struct question *question, struct context *context) {
    return record_now(question, context, context->probe);
}

static int query_anchor(struct question *question, struct context *context) {
    return question->driver.event_query(context->anchor);
}

static int query_probe(struct question *question, struct context *context) {
    return question->driver.event_query(context->probe);
}

static bool still_captured(struct question *question) {
    while (self.captured_count > 0) {
        int capturing = 0;
        const int code = question->driver.is_capturing(self.captured[self.captured_count - 1], &capturing);
        if (code != SUCCESS || capturing != 0) {
            return true;
        }
        self.captured_count--;
    }
    return false;
}

/* CAPTURE_IMPLICIT: a capture may be in progress, nothing was recorded. */
static int record_if_free(struct question *question, int (*record)(struct question *, struct context *)) {
    if (now_ns() - self.gated_ns < self.settle_ns || still_captured(question) || !capture_gate_enter()) {
        return CAPTURE_IMPLICIT;
    }
    const int free_of_captures = each_context(question, legacy_stream);
    const int code = free_of_captures != SUCCESS ? free_of_captures : each_context(question, record);
    capture_gate_leave();
    return code;
}

struct progress {
    bool pending;       /* an anchor is */
    int64_t anchor_ns;  /* when it was recorded */
    int64_t done_ns;    /* how long the last one that was done has taken; -1: none was */
    int64_t longest_ns; /* any has */
    int64_t held_ns;    /* how long launches were held, and the queue was not short after all */
    bool recorded;      /* an event was */
};

/* 0: everything that was queued when we came is done. NOT_READY, or CAPTURE_IMPLICIT: it is not known. */
static int look_at_queue(struct question *question, struct progress *progress) {
    const int code = record_if_free(question, record_probe);
    const int64_t begin = now_ns();
    int ready = code;
    if (code != SUCCESS) {
        pause_ns(LOOK_NS);
        return code;
    }
    progress->recorded = true;
    while ((ready = each_context(question, query_probe)) == NOT_READY && now_ns() - begin < SHORT_NS) {
        pause_ns(LOOK_NS);
    }
    return ready;
}

/* With `hold`, the program cannot queue anything more after the moment. */
static bool is_short(struct question *question, struct progress *progress) {
    if (look_at_queue(question, progress) != SUCCESS) {
        return false;
    }
    if (!question->wish.hold) {
        return true;
    }
    if (progress->held_ns >= HELD_MOST_NS) {
        return false;
    }
    const int64_t begin = now_ns();
    launches_hold(question->driver.library);
    const bool still = look_at_queue(question, progress) == SUCCESS;
    if (!still) {
        launches_release();
        progress->held_ns += now_ns() - begin;
    }
    return still;
}

static void look_at_anchor(struct question *question, struct progress *progress) {
    if (progress->pending && each_context(question, query_anchor) != NOT_READY) {
        progress->done_ns = now_ns() - progress->anchor_ns;
        progress->longest_ns = progress->done_ns > progress->longest_ns ? progress->done_ns : progress->longest_ns;
        progress->pending = false;
    }
}

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
    const bool now_short = is_short(question, progress);
    look_at_anchor(question, progress);
    const int64_t now = now_ns(), asked_ns = now - question->begun_ns;
    const int64_t waiting = progress->pending ? now - progress->anchor_ns : 0;
    const int64_t steady = STEADY_TIMES * progress->done_ns > STEADY_NS ? STEADY_TIMES * progress->done_ns : STEADY_NS;
    const bool soon = progress->done_ns >= 0 && progress->done_ns <= question->wish.limit_ns &&
                      waiting <= question->wish.limit_ns;
    result->queued_ns = (uint64_t)(progress->longest_ns > waiting ? progress->longest_ns : waiting);
    result->outcome = now_short            ? KC_DRAIN_SHORT
                      : soon               ? KC_DRAIN_SOON
                      : progress->recorded ? KC_DRAIN_NOT
                                           : KC_DRAIN_CAPTURING;
    return now_short || asked_ns >= question->wish.patience_ns || (soon && asked_ns >= steady) ||
           is_now(question, GIVEN_UP);
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

/* Those of torch's streams that are captured now. torch never destroys them. */
static void find_captured(struct question *question) {
    self.captured_count = 0;
    for (uint32_t i = 0; i < question->wish.stream_count; i++) {
        void *stream = (void *)(uintptr_t)question->streams[i]; // NOLINT: a handle, as torch gave it
        int capturing = 0;
        if (question->driver.is_capturing(stream, &capturing) == SUCCESS && capturing != 0) {
            self.captured[self.captured_count++] = stream;
        }
    }
}

static void answer(struct question *question) {
    struct progress progress = {.done_ns = -1};
    int mode = CAPTURE_MODE_RELAXED;
    find_contexts(question);
    if (question->count == 0) {
        question->result.outcome = KC_DRAIN_SHORT; /* nothing to wait for */
        return;
    }
    if (is_now(question, GIVEN_UP)) {
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
        self.settle_ns = question->wish.settle_ns;
        find_captured(question);
    }
    const int code = question->wish.only_gate ? SUCCESS : each_context(question, make_events);
    if (code != SUCCESS) {
        question->result.outcome = KC_DRAIN_UNKNOWN;
        question->result.code = code;
    } else if (!question->wish.only_gate) {
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
    const bool held = question->wish.hold && question->result.outcome == KC_DRAIN_SHORT;
    if (!settle(question, ANSWERED)) {
        if (held) {
            launches_release(); /* nobody waits for the moment any more */
        }
        __atomic_store_n(&question->state, ANSWERED, __ATOMIC_SEQ_CST);
    }
    wake_post(&self.wake);
    let_go(question);
    return NULL;
}

/* ---- the agent's thread ---- */

void *drain_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (library != NULL) {
        dlclose(library); /* it stays: CUDA is never unloaded */
    }
    return library;
}

static bool find_driver(struct driver *driver) {
    driver->library = drain_driver();
    if (driver->library == NULL) {
        return false;
    }
    bool all = true;
#define FIND(field, name, parameters)                          \
    *(void **)&driver->field = dlsym(driver->library, (name)); \
    all = all && driver->field != NULL;
    DRIVER_FUNCTIONS(FIND)
#undef FIND
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
        if (is_now(question, ANSWERED)) {
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
    if (self.unanswered != NULL && is_now(self.unanswered, ANSWERED)) {
        let_go(self.unanswered);
        self.unanswered = NULL;
    }
}

static void unanswered(const struct question *question, struct kc_drain_result *result) {
    result->outcome = KC_DRAIN_NOT;
    result->queued_ns = result->waited_ns = (uint64_t)(now_ns() - question->begun_ns);
}

void drain_await(const struct drain_wish *wish, struct kc_drain_result *result) {
    struct driver driver;
    memset(result, 0, sizeof *result);
    __atomic_store_n(&self.hurried, 0, __ATOMIC_SEQ_CST);
    if (self.unanswered != NULL && !answered_within(self.unanswered, wish->patience_ns)) {
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
    *question = (struct question){.wish = *wish, .driver = driver, .begun_ns = now_ns(), .users = 2};
    question->wish.stream_count = wish->stream_count < STREAMS_MOST ? wish->stream_count : STREAMS_MOST;
    for (uint32_t i = 0; i < question->wish.stream_count; i++) {
        question->streams[i] = wish->streams[i];
    }
    if (!start(question)) {
        free(question);
        result->outcome = KC_DRAIN_UNKNOWN;
        return;
    }
    if (answered_within(question, wish->patience_ns + ANSWER_NS) || !settle(question, GIVEN_UP)) {
        *result = question->result;
        let_go(question);
    } else {
        self.unanswered = question;
        unanswered(question, result);
    }
}

void drain_end(void) {
    forget_answered();
    if (self.unanswered == NULL && self.gated) {
        capture_gate_remove();
        self.gated = false;
    }
}

void drain_forked(void) {
    self.unanswered = NULL; /* the thread is in the parent */
    launches_release();
    capture_gate_leave();
}
