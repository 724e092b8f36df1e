/* See device_drain.h.
 *
 * Theory of operation
 *   The first call of CUPTI in a process, and cuptiFinalize, return when all work on the device is done, and until then
 *   the program's launches wait with them (measured on H200s with driver 580: 2.8 s of a kernel of 3 s; a kernel that
 *   does not end stops the program for good). So the caller must know beforehand that the work ends soon.
 *
 *   cuCtxRecordEvent marks all the work of a context that is queued now, and cuEventQuery reports when it is done;
 *   neither waits. One event after the other is recorded. If one is done within SHORT_NS, the device is nearly idle:
 *   that is the moment. If the queue never gets that short (a loop that computes all the time), the time that an event
 *   took is an estimate of the wait.
 *
 *   Recording such an event ends the program's captures in progress, so it is recorded only when there can be none:
 *   captures that begin now are noted (capture_gate.c). Earlier ones are looked for: on blocking streams by querying
 *   the legacy stream, which is harmless, and on torch's streams by querying each. The rest, captures on streams of
 *   other libraries, have settle_ns to end.
 *
 *   A call of the driver waits where another thread holds the driver's lock while the device is busy (cuMemFree does).
 *   So a dedicated thread makes them, and is left behind if it does not answer in time. The next question waits for its
 *   answer first. If many threads launch without a pause, it gets the lock once in seconds (64 threads, 700,000
 *   launches a second): then launches pause for a moment.
 *
 *   All primary contexts, which CUDA's runtime uses, are checked, and those of cuCtxCreate into which the program was
 *   seen to launch something (launches.c). CUPTI waits for others, too. So the dedicated thread also makes its first
 *   call; the program's launches into other contexts than the busy one go on then (20 ms in place of 2,670). If several
 *   threads launch, they are held back during it, so that it gets the driver's lock, and pause again and again if it
 *   does not return.
 *
 * Threads: drain_await and drain_end on the agent's; the rest on the dedicated thread, with signals blocked.
 * Blocks: drain_await up to its patience and ANSWER_NS, one pause of launches more, and its patience again if an
 *   earlier question is unanswered. The dedicated thread blocks inside the driver.
 */
#define _GNU_SOURCE
#include "cupti/device_drain.h"

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
#include "cupti/drain_contexts.h"
#include "cupti/launches.h"

#define SHORT_NS 3000000LL
#define LOOK_NS 250000L         /* between two looks at an event */
#define STEADY_NS 200000000LL   /* how long to look for a shorter queue, at least, */
#define STEADY_TIMES 4          /* and how many times the length of the queue */
#define ANSWER_NS 200000000LL   /* for calls of the driver that wait for locks of its own */
#define STARVED_NS 20000000LL   /* without a call of the driver returning; then launches pause */
#define MAY_WAIT_NS 400000000LL /* for another tool that enters CUPTI */
#define OTHERS_NS 100000000LL   /* to see launches into a context, if there is no primary one */
#define STACK_BYTES (1u << 20)  /* CUPTI is initialised on it */
#define STREAMS_MOST 1024u
#define HOLD_NS 100000000LL      /* of launches, from that moment */
#define HELD_MOST_NS 100000000LL /* if the queue is not short after all */
#define CALL_HOLD_NS 30000000LL  /* while `call` runs, if a crowd (launches.h) is seen within CROWD_NS */
#define CROWD_NS 1000000LL
enum state { ASKED, ANSWERED, GIVEN_UP /* by who asked, so the thread ends as soon as it can */ };

/* One question. The last side that needs it frees it. */
struct question {
    struct drain_wish wish;
    uint64_t streams[STREAMS_MOST]; /* copied from the wish, whose owner does not keep them */
    struct drain_contexts contexts;
    int64_t begun_ns;
    int64_t held; /* by is_short, until when */
    struct launch_pauses pauses;
    uint32_t state;
    uint32_t calling; /* the call of the wish has begun */
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
    void *captured[STREAMS_MOST]; /* streams that were captured then, and may still be */
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

/* Moves on from ASKED to `state`. False: the other side was first. */
static bool settle(struct question *question, uint32_t state) {
    uint32_t asked = ASKED;
    return __atomic_compare_exchange_n(&question->state, &asked, state, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

static void let_go(struct question *question) {
    if (__atomic_sub_fetch(&question->users, 1, __ATOMIC_SEQ_CST) == 0) {
        free(question);
    }
}

/* ---- the dedicated thread ---- */

static int ask_stream(struct question *question, void *stream, int *capturing) {
    contexts_call_begin(&question->contexts);
    const int code = question->contexts.driver.is_capturing(stream, capturing);
    contexts_call_end(&question->contexts);
    return code;
}

static bool still_captured(struct question *question) {
    while (self.captured_count > 0) {
        int capturing = 0;
        const int code = ask_stream(question, self.captured[self.captured_count - 1], &capturing);
        if (code != SUCCESS || capturing != 0) {
            return true;
        }
        self.captured_count--;
    }
    return false;
}

/* CAPTURE_IMPLICIT: a capture may be in progress, nothing was recorded. */
static int record_if_free(struct question *question, context_call record) {
    contexts_answered(&question->contexts);
    if (now_ns() - self.gated_ns < self.settle_ns || still_captured(question)) {
        return CAPTURE_IMPLICIT;
    }
    const int added = contexts_add_noted(&question->contexts);
    if (added != SUCCESS) {
        return added;
    }
    contexts_call_begin(&question->contexts); /* around all: in between, captures of the program would have to wait */
    int code = CAPTURE_IMPLICIT;
    if (capture_gate_enter()) {
        const int free_of_captures = contexts_each(&question->contexts, context_ask_legacy_stream);
        code = free_of_captures != SUCCESS ? free_of_captures : contexts_each(&question->contexts, record);
        capture_gate_leave();
    }
    contexts_call_end(&question->contexts);
    return code;
}

struct progress {
    bool pending;       /* an anchor is pending */
    int64_t anchor_ns;  /* when the anchor was recorded */
    int64_t done_ns;    /* how long the last completed one took; -1: none */
    int64_t longest_ns; /* of all of them */
    int64_t held_ns;    /* how long launches were held although the queue was not short after all */
    bool recorded;      /* an event was recorded */
};

/* 0: everything queued at the start is done. NOT_READY or CAPTURE_IMPLICIT: unknown. */
static int look_at_queue(struct question *question, struct progress *progress) {
    const int code = record_if_free(question, context_record_probe);
    const int64_t begin = now_ns();
    int ready = code;
    if (code != SUCCESS) {
        pause_ns(LOOK_NS);
        return code;
    }
    progress->recorded = true;
    while ((ready = contexts_each(&question->contexts, context_query_probe)) == NOT_READY &&
           now_ns() - begin < SHORT_NS) {
        pause_ns(LOOK_NS);
    }
    return ready;
}

/* With `hold`, the program cannot queue more work after the moment. */
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
    const int64_t held = launches_hold(HOLD_NS);
    const bool still = look_at_queue(question, progress) == SUCCESS;
    question->held = held;
    if (!still) {
        launches_release(held);
        progress->held_ns += now_ns() - begin;
    }
    return still;
}

static void look_at_anchor(struct question *question, struct progress *progress) {
    if (progress->pending && contexts_each(&question->contexts, context_query_anchor) != NOT_READY) {
        progress->done_ns = now_ns() - progress->anchor_ns;
        progress->longest_ns = progress->done_ns > progress->longest_ns ? progress->done_ns : progress->longest_ns;
        progress->pending = false;
    }
}

/* Checks once and returns whether there is an answer; an error of the driver is one. */
static bool look(struct question *question, struct progress *progress) {
    struct kc_drain_result *result = &question->result;
    if (!progress->pending) {
        const int code = record_if_free(question, context_record_anchor);
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
    const bool soon = progress->done_ns >= 0 && progress->longest_ns <= question->wish.limit_ns &&
                      waiting <= question->wish.limit_ns;
    result->queued_ns = (uint64_t)(progress->longest_ns > waiting ? progress->longest_ns : waiting);
    result->outcome = now_short            ? KC_DRAIN_SHORT
                      : soon               ? KC_DRAIN_SOON
                      : progress->recorded ? KC_DRAIN_NOT
                                           : KC_DRAIN_CAPTURING;
    return now_short || asked_ns >= question->wish.patience_ns || (soon && asked_ns >= steady) ||
           is_now(question, GIVEN_UP);
}

/* Finds torch's streams that are being captured now. torch never destroys them. */
static void find_captured(struct question *question) {
    self.captured_count = 0;
    for (uint32_t i = 0; i < question->wish.stream_count && !is_now(question, GIVEN_UP); i++) {
        void *stream = (void *)(uintptr_t)question->streams[i]; // NOLINT: a handle, as torch gave it
        int capturing = 0;
        if (ask_stream(question, stream, &capturing) == SUCCESS && capturing != 0) {
            self.captured[self.captured_count++] = stream;
        }
    }
}

static void answer(struct question *question) {
    struct progress progress = {.done_ns = -1};
    int mode = CAPTURE_MODE_RELAXED;
    if (question->wish.blind) {
        question->result.outcome = KC_DRAIN_UNKNOWN;
        return;
    }
    const bool gates = !self.gated; /* before the first call of the driver, which launches may block */
    if (gates) {
        self.gated = capture_gate_place(question->contexts.driver.library);
        self.gated_ns = now_ns();
    }
    if (gates && self.gated) {
        contexts_watch(question->contexts.driver.library);
    }
    if (self.gated) {
        launches_watch(question->contexts.driver.library);
    }
    if (!contexts_find(&question->contexts)) {
        question->result.outcome = KC_DRAIN_SHORT;
        return;
    }
    if (is_now(question, GIVEN_UP)) {
        return;
    }
    if (!self.gated) {
        question->result.outcome = KC_DRAIN_UNKNOWN;
        return;
    }
    contexts_call_begin(&question->contexts);
    (void)question->contexts.driver.exchange_mode(&mode);
    contexts_call_end(&question->contexts);
    if (gates) {
        const bool others_only = question->contexts.count == 0 && question->wish.settle_ns > OTHERS_NS;
        self.settle_ns = others_only ? OTHERS_NS : question->wish.settle_ns;
        find_captured(question);
    }
    const int code = question->wish.only_gate ? SUCCESS : contexts_each(&question->contexts, context_make_events);
    if (code != SUCCESS) {
        question->result.outcome = KC_DRAIN_UNKNOWN;
        question->result.code = code;
    } else if (!question->wish.only_gate) {
        while (!look(question, &progress)) {
        }
    }
}

/* Holds launches if several threads launch at once. */
static void hold_crowd(void) {
    const int64_t until_ns = now_ns() + CROWD_NS, held = launches_hold(CALL_HOLD_NS);
    while (!launches_crowd() && now_ns() < until_ns) {
        pause_ns(LOOK_NS / 4);
    }
    if (!launches_crowd()) {
        launches_release(held);
    }
}

/* Returns whether the call was made. */
static bool call(struct question *question) {
    const int32_t outcome = question->result.outcome;
    const bool may = outcome != KC_DRAIN_NOT && outcome != KC_DRAIN_CAPTURING && !is_now(question, GIVEN_UP);
    if (may && question->wish.call != NULL) {
        __atomic_store_n(&question->calling, 1, __ATOMIC_SEQ_CST);
        if (launches_held_until_ns() != question->held || !launches_are_held()) { /* a pause ends before the call */
            hold_crowd();
        }
        question->wish.call();
    }
    return may && question->wish.call != NULL;
}

static void *ask(void *argument) {
    struct question *question = argument;
    (void)prctl(PR_SET_NAME, "kineto-drain", 0, 0, 0);
    answer(question);
    question->result.waited_ns = (uint64_t)(now_ns() - question->begun_ns);
    const bool called = call(question);
    contexts_close(&question->contexts); /* while launches are held: it takes the driver's lock, too */
    if (question->wish.call != NULL || question->wish.only_gate) {
        launches_leave();
    }
    if (!settle(question, ANSWERED)) {
        if (called) {
            question->wish.undo(); /* the caller has stopped waiting */
        }
        __atomic_store_n(&question->state, ANSWERED, __ATOMIC_SEQ_CST);
    }
    wake_post(&self.wake);
    let_go(question);
    return NULL;
}

/* ---- the agent's thread ---- */

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

struct step {
    struct question *question;
    uint32_t number;
};

static bool step_is_over(void *argument) {
    const struct step *step = argument;
    return contexts_steps(&step->question->contexts) != step->number || is_now(step->question, ANSWERED) ||
           __atomic_load_n(&self.hurried, __ATOMIC_SEQ_CST) != 0;
}

/* Many launching threads keep every other driver call waiting, for good at worst; it gets through once they pause. */
static bool answered_within(struct question *question, int64_t limit_ns) {
    const int64_t deadline = now_ns() + limit_ns;
    for (;;) {
        struct step step = {question, contexts_steps(&question->contexts)};
        const uint32_t seen = wake_seen(&self.wake);
        const int64_t left = deadline - now_ns();
        if (is_now(question, ANSWERED)) {
            return true;
        }
        if (left <= 0 || __atomic_load_n(&self.hurried, __ATOMIC_SEQ_CST) != 0) {
            return false;
        }
        wake_wait(&self.wake, seen, left < STARVED_NS ? left : STARVED_NS);
        if (step_is_over(&step)) {
            question->pauses = (struct launch_pauses){0, 0};
        } else {
            launches_pause(&question->pauses, step_is_over, &step);
        }
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
    const bool called = __atomic_load_n(&question->calling, __ATOMIC_SEQ_CST) != 0;
    if (called) {
        /* Its thread is stuck in the call, and stops watching launches once it returns. */
        launches_release(launches_held_until_ns());
    }
    result->outcome = called ? KC_DRAIN_CALLED : KC_DRAIN_UNANSWERED;
    result->queued_ns = result->waited_ns = (uint64_t)(now_ns() - question->begun_ns);
}

/* Without a thread it is unknown. */
static void call_here(const struct drain_wish *wish) {
    if (wish->call != NULL) {
        wish->call();
    }
}

void drain_await(const struct drain_wish *wish, struct kc_drain_result *result) {
    struct drain_driver driver;
    memset(result, 0, sizeof *result);
    __atomic_store_n(&self.hurried, 0, __ATOMIC_SEQ_CST);
    if (self.unanswered != NULL) {
        self.unanswered->pauses = (struct launch_pauses){0, 0}; /* each question may make its own */
        if (!answered_within(self.unanswered, wish->patience_ns)) {
            unanswered(self.unanswered, result);
            return;
        }
    }
    forget_answered();
    const bool can_ask = driver_find(&driver);
    result->outcome = driver.library == NULL ? KC_DRAIN_SHORT : KC_DRAIN_UNKNOWN;
    if (!can_ask && wish->call == NULL) {
        return;
    }
    struct question *question = calloc(1, sizeof *question);
    if (question == NULL) {
        call_here(wish);
        return;
    }
    *question = (struct question){
        .wish = *wish, .contexts = {.driver = driver, .may_wait_ns = MAY_WAIT_NS}, .begun_ns = now_ns(), .users = 2};
    question->wish.blind = wish->blind || !can_ask;
    question->wish.stream_count = wish->stream_count < STREAMS_MOST ? wish->stream_count : STREAMS_MOST;
    for (uint32_t i = 0; i < question->wish.stream_count; i++) {
        question->streams[i] = wish->streams[i];
    }
    if (!start(question)) {
        free(question);
        call_here(wish);
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
        launches_leave();
        contexts_forget();
        self.gated = false;
    }
}

void drain_forked(void) {
    self.unanswered = NULL; /* the thread is in the parent */
    launches_release(launches_held_until_ns());
    context_leave();
    capture_gate_leave();
}
