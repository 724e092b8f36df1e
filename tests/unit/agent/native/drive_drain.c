/* Drives the search for a moment without GPU work against the fake driver and the fake libcupti, one process for each
 * scenario, for the tests and the sanitizers.
 *
 *   drive_drain LIBCUDA LIBCUPTI [SCENARIO]
 *
 * Exits with 0 if all is as it has to be: above all, no capture of a graph is ended, and every function of the driver
 * leads to its own implementation afterwards.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "drain_program.h"
#include "common/wake.h"
#include "cupti/capture_gate.h"
#include "cupti/collector.h"
#include "cupti/driver_slots.h"
#include "cupti/launches.h"
#include "fake_driver.h"

/* ---- the queue ---- */

static void unused(void) {
    driver.set(FAKE_CONTEXTS, -1);
    CHECK(outcome() == KC_DRAIN_SHORT);
    CHECK(driver.recorded() == 0);
    ends();
}

static void idle(void) {
    CHECK(outcome() == KC_DRAIN_SHORT);
    CHECK(driver.recorded() > 0 && !driver.intact());
    ends();
}

static bool is_soon(void) {
    const struct kc_drain_result result = drain(1200, NULL, 0);
    return result.outcome == KC_DRAIN_SOON && result.queued_ns >= 60 * NS_PER_MS;
}

static void steady(void) {
    driver.set(FAKE_STEADY_MS, 60);
    WITHIN(200, is_soon());
    ends();
}

static void never(void) {
    driver.set(FAKE_NEVER, 1);
    const int64_t begin = clock_ns(CLOCK_MONOTONIC);
    const struct kc_drain_result result = drain(300, NULL, 0);
    const uint64_t took_ns = (uint64_t)(clock_ns(CLOCK_MONOTONIC) - begin);
    CHECK(result.outcome == KC_DRAIN_NOT && result.queued_ns >= PATIENCE_NS / 2 && result.queued_ns <= took_ns);
    CHECK(driver.intact());
    driver.set(FAKE_NEVER, 0);
    CHECK(outcome() == KC_DRAIN_SHORT);
    ends();
}

static void old(void) {
    CHECK(outcome() == KC_DRAIN_UNKNOWN);
    CHECK(driver.intact());
}

/* ---- captures ---- */

static void end_well(uintptr_t stream) {
    void *graph;
    CHECK(driver.end(stream, &graph) == 0);
}

static void noted(void) {
    CHECK(outcome() == KC_DRAIN_SHORT);
    CHECK(driver.begin_v2(STREAM, GLOBAL) == 0);
    CHECK(outcome() == KC_DRAIN_CAPTURING);
    end_well(STREAM);
    CHECK(outcome() == KC_DRAIN_SHORT);
    ends();
}

static void blocking(void) {
    CHECK(driver.begin_v2(BLOCKING_STREAM, GLOBAL) == 0);
    CHECK(outcome() == KC_DRAIN_CAPTURING);
    end_well(BLOCKING_STREAM);
    CHECK(outcome() == KC_DRAIN_SHORT);
    ends();
}

static void given(void) {
    const uint64_t streams[] = {STREAM, STREAM + 1, STREAM + 2};
    CHECK(driver.begin(STREAM + 1) == 0);
    CHECK(drain(300, streams, 3).outcome == KC_DRAIN_CAPTURING);
    end_well(STREAM + 1);
    CHECK(drain(300, streams, 3).outcome == KC_DRAIN_SHORT);
    ends();
}

static void *end_elsewhere(void *result) {
    void *graph;
    *(int *)result = driver.end(STREAM, &graph);
    return NULL;
}

static void wrong_thread(void) {
    pthread_t thread;
    void *graph;
    int result = 0;
    CHECK(outcome() == KC_DRAIN_SHORT);
    CHECK(driver.end(STREAM, &graph) != 0); /* one that never began */
    CHECK(driver.begin_v2(STREAM, THREAD_LOCAL) == 0);
    CHECK(pthread_create(&thread, NULL, end_elsewhere, &result) == 0);
    CHECK(pthread_join(thread, NULL) == 0 && result == WRONG_THREAD);
    CHECK(outcome() == KC_DRAIN_CAPTURING);
    end_well(STREAM);
    CHECK(outcome() == KC_DRAIN_SHORT);
    ends();
}

static void *capture_on(void *argument) {
    const uintptr_t stream = STREAM + (uintptr_t)argument;
    void *graph;
    for (unsigned n = 0; atomic_load(&goes_on); n++) {
        const unsigned way = n % 4;
        CHECK((way == 0   ? driver.begin(stream)
               : way == 1 ? driver.begin_v2(stream, THREAD_LOCAL)
               : way == 2 ? driver.begin_to(stream, 7, 8, 9, 10, GLOBAL)
                          : driver.begin_v2_ptsz(0, GLOBAL)) == 0);
        const int ended = way == 3 ? driver.end_ptsz(0, &graph) : driver.end(stream, &graph);
        CHECK(driver.harmed() == 0 && ended == 0);
        pause_us(n % 7 * 10);
    }
    return NULL;
}

/* Captures begin and end all the time, while moments are sought in quick succession. */
static void hammer(void) {
    pthread_t all[3];
    int64_t event = 0;
    unsigned moments = 0;
    CHECK(outcome() == KC_DRAIN_SHORT);
    atomic_store(&goes_on, true);
    for (uintptr_t i = 0; i < 3; i++) {
        CHECK(pthread_create(&all[i], NULL, capture_on, (void *)i) == 0);
    }
    for (const int64_t begin = clock_ns(CLOCK_MONOTONIC); clock_ns(CLOCK_MONOTONIC) - begin < 2000 * NS_PER_MS;) {
        if (capture_gate_enter()) {
            moments++;
            if (capture_gate_recording()) {
                (void)driver.record(NULL, &event);
            }
            capture_gate_leave();
        }
        if (moments % 64 == 63) {
            const int found = outcome();
            CHECK(found != KC_DRAIN_UNKNOWN);
        }
    }
    atomic_store(&goes_on, false);
    for (int i = 0; i < 3; i++) {
        CHECK(pthread_join(all[i], NULL) == 0);
    }
    CHECK(moments > 0 && driver.harmed() == 0);
    CHECK(outcome() == KC_DRAIN_SHORT); /* none is taken to be in progress still */
    ends();
}

static int (*who_was_before)(uintptr_t, void **);
static int end_by_another(uintptr_t stream, void **graph) { return who_was_before(stream, graph); }

/* Somebody else leads a function through his own and on to ours: we do not lead on to him. */
static void another_in_between(void) {
    void *graph, **slot = driver_slot(dlsym(cuda, "cuStreamEndCapture"));
    int (*const theirs)(uintptr_t, void **) = end_by_another;
    CHECK(slot != NULL);
    void *original = *slot;
    CHECK(capture_gate_place(cuda));
    *(void **)&who_was_before = *slot;
    *slot = *(void *const *)&theirs;
    capture_gate_remove();
    CHECK(!capture_gate_place(cuda));
    CHECK(driver.end(STREAM, &graph) != 0);
    *slot = original;
    CHECK(outcome() == KC_DRAIN_SHORT);
    ends();
}

/* ---- who does not answer ---- */

static void blocked(void) {
    uint64_t *streams = calloc(64, sizeof *streams);
    driver.set(FAKE_BLOCK_RETAIN, 1);
    CHECK(drain(300, streams, 64).outcome == KC_DRAIN_UNANSWERED);
    free(streams);
    driver.set(FAKE_BLOCK_CREATE, 1);
    driver.set(FAKE_BLOCK_RETAIN, 0);
    CHECK(outcome() == KC_DRAIN_UNANSWERED);
    CHECK(outcome() == KC_DRAIN_UNANSWERED);
    CHECK(threads_that_ask() == 1);
    driver.set(FAKE_BLOCK_CREATE, 0);
    CHECK(outcome() == KC_DRAIN_SHORT);
    UNTIL(threads_that_ask() == 0);
    ends();
}

static void starved(void) {
    driver.is_held(are_held);
    driver.set(FAKE_STARVED, 1);
    CHECK(outcome_after(400) == KC_DRAIN_SHORT); /* it is not asked anything before */
    CHECK(!launches_are_held());
    ends();
}

/* First another thread keeps the driver's lock, so that pauses are in vain; then launches do. */
static void starved_later(void) {
    pthread_t thread;
    int result = -1;
    driver.is_held(are_held);
    driver.set(FAKE_BLOCK_RETAIN, 1);
    driver.set(FAKE_STARVED, 1);
    CHECK(pthread_create(&thread, NULL, run_drain, &result) == 0);
    UNTIL(driver.blocked());
    pause_us(400000);
    driver.set(FAKE_BLOCK_RETAIN, 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(result == KC_DRAIN_SHORT);
    ends();
}

static void hurry(void) {
    pthread_t thread;
    int result = -1;
    driver.set(FAKE_NEVER, 1);
    CHECK(pthread_create(&thread, NULL, run_drain, &result) == 0);
    UNTIL(driver.recorded() > 0);
    const int64_t begin = clock_ns(CLOCK_MONOTONIC);
    UNTIL((kc_hurry(), pthread_tryjoin_np(thread, NULL) == 0));
    CHECK(result == KC_DRAIN_UNANSWERED && clock_ns(CLOCK_MONOTONIC) - begin < PATIENCE_NS);
    driver.set(FAKE_NEVER, 0);
    CHECK(outcome() == KC_DRAIN_SHORT);
    ends();
}

static void child_goes_on(void) {
    const int64_t begin = clock_ns(CLOCK_MONOTONIC), nothing = 0;
    struct kc_drain_result result;
    const struct kc_drain_wish wish = {300, 0, 0};
    for (int i = 0; i < GRAPHS; i++) {
        CHECK(driver.begin_v2(STREAM, GLOBAL) == 0);
        end_well(STREAM);
        CHECK(driver.launch(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, &nothing) == 0);
    }
    CHECK(clock_ns(CLOCK_MONOTONIC) - begin < GRAPHS * 10 * NS_PER_MS);
    CHECK(kc_drain(&wish, NULL, &result) == KC_FORKED);
    _exit(0);
}

static void forks(void) {
    pthread_t thread;
    int result = -1, status = -1;
    driver.set(FAKE_BLOCK_RECORD, 1);
    CHECK(pthread_create(&thread, NULL, run_drain, &result) == 0);
    UNTIL(driver.blocked());
    const pid_t child = fork();
    if (child == 0) {
        child_goes_on();
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    driver.set(FAKE_BLOCK_RECORD, 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(outcome() == KC_DRAIN_SHORT);
    ends();
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
static void no_thread(void) {}
#else
static void no_thread(void) {
    struct rlimit before, none;
    CHECK(getrlimit(RLIMIT_AS, &before) == 0);
    none = (struct rlimit){1, before.rlim_max};
    CHECK(setrlimit(RLIMIT_AS, &none) == 0);
    CHECK(outcome() == KC_DRAIN_UNKNOWN);
    CHECK(setrlimit(RLIMIT_AS, &before) == 0);
    CHECK(outcome() == KC_DRAIN_SHORT);
    ends();
}
#endif

/* ---- CUPTI's first call ---- */

/* It waits for work that nobody could know of. */
static void call_stands(void) {
    int32_t result = 0;
    CHECK(outcome() == KC_DRAIN_SHORT);
    prepare();
    fake.set("enter_delay_ms", 1000000);
    CHECK(kc_subscribe(&result) == KC_BUSY && result == KC_DRAIN_CALLED);
    CHECK(!launches_are_held());
    CHECK(kc_close() == 0);
    CHECK(outcome() == KC_DRAIN_CALLED);
    CHECK(threads_that_ask() == 1);
    fake.set("enter_delay_ms", 0);
    UNTIL(threads_that_ask() == 0);
    CHECK(!fake.subscribed());
    CHECK(outcome() == KC_DRAIN_SHORT);
    prepare();
    CHECK(kc_subscribe(&result) == 0 && result == 0 && fake.subscribed());
    CHECK(kc_close() == 0);
    ends();
}

/* 15: it has not initialised, so the next call is the first one again. */
static void call_fails(void) {
    int32_t result = 0;
    CHECK(outcome() == KC_DRAIN_SHORT);
    prepare();
    fake.set("subscribe_result", 15);
    CHECK(kc_subscribe(&result) == KC_CUPTI && result == 15);
    CHECK(kc_close() == 0);
    driver.set(FAKE_NEVER, 1);
    CHECK(outcome() == KC_DRAIN_NOT);
    driver.set(FAKE_NEVER, 0);
    CHECK(outcome() == KC_DRAIN_SHORT);
    prepare();
    fake.set("enter_delay_ms", 1000000);
    CHECK(kc_subscribe(&result) == KC_BUSY && result == KC_DRAIN_CALLED);
    CHECK(kc_close() == 0);
    fake.set("enter_delay_ms", 0);
    UNTIL(threads_that_ask() == 0);
    driver.set(FAKE_NEVER, 1);
    CHECK(outcome() == KC_DRAIN_NOT);
    ends();
}

/* ---- the end ---- */

static void *keep_calling(void *unused_argument) {
    (void)unused_argument;
    while (atomic_load(&goes_on)) {
        fake.memset(1, 1, 0);
        pause_us(200);
    }
    return NULL;
}

static void record(void) {
    static const uint32_t MEMSET = 2;
    struct kc_stop_result stopped;
    int32_t result = -1;
    int code = -1;
    char error[256];
    WITHIN(200, outcome() == KC_DRAIN_SHORT);
    prepare();
    (void)run_subscribe(&code);
    CHECK(code == 0);
    CHECK(kc_start(&MEMSET, 1, &result, error, sizeof error) == 0);
    (void)fake.launch("kernel", 1, 0);
    CHECK(kc_stop(60000, &stopped) == 0);
}

static void detach(void) {
    pthread_t caller;
    struct kc_detach_result result;
    record();
    driver.set(FAKE_NEVER, 1);
    CHECK(kc_detach(60000, &result) == 0);
    CHECK(result.outcome == KC_DETACH_BUSY && result.result == KC_DRAIN_NOT && result.ns > PATIENCE_NS / 2);
    CHECK(!fake.subscribed());
    ends();
    const unsigned recorded = driver.recorded();
    record(); /* CUPTI is there already, so nothing has to end */
    CHECK(driver.recorded() == recorded);
    driver.set(FAKE_NEVER, 0);
    CHECK(driver.begin_v2(STREAM, GLOBAL) == 0);
    CHECK(kc_detach(60000, &result) == 0);
    CHECK(result.outcome == KC_DETACH_BUSY && result.result == KC_DRAIN_CAPTURING);
    end_well(STREAM);
    ends();
    record();
    atomic_store(&goes_on, true);
    CHECK(pthread_create(&caller, NULL, keep_calling, NULL) == 0);
    CHECK(kc_detach(60000, &result) == 0 && result.outcome == KC_DETACHED);
    atomic_store(&goes_on, false);
    CHECK(pthread_join(caller, NULL) == 0);
    CHECK(fake.misused() == 0);
    ends();
}

static int some_wait(void) { return launches_waiting() > 0; }

/* Each takes a lock of the driver that four threads leave to nobody else; so do the calls that look for the moment. */
static void among_launches(void) {
    pthread_t all[4], caller;
    struct kc_detach_result result;
    fake.set("starved", 1);
    driver.is_held(some_wait);
    driver.set(FAKE_STARVED, 1);
    atomic_store(&goes_on, true);
    for (int i = 0; i < 4; i++) {
        CHECK(pthread_create(&all[i], NULL, launch_without_a_pause, NULL) == 0);
    }
    record();
    driver.set(FAKE_NEVER, 1);
    CHECK(kc_detach(60000, &result) == 0 && result.outcome == KC_DETACH_BUSY);
    CHECK(kc_close() == 0);
    driver.set(FAKE_NEVER, 0);
    CHECK(pthread_create(&caller, NULL, keep_calling, NULL) == 0);
    WITHIN(200, (record(), kc_detach(60000, &result) == 0 && kc_close() == 0 && result.outcome == KC_DETACHED));
    atomic_store(&goes_on, false);
    for (int i = 0; i < 4; i++) {
        CHECK(pthread_join(all[i], NULL) == 0);
    }
    CHECK(pthread_join(caller, NULL) == 0);
    ends();
}

static void detach_beside_another(void) {
    struct kc_detach_result result;
    fake.set("context", OTHER);
    record();
    driver.set(FAKE_OTHER_NEVER, 1);
    CHECK(kc_detach(60000, &result) == 0);
    CHECK(result.outcome == KC_DETACH_BUSY && result.result == KC_DRAIN_NOT);
    ends();
}

// clang-format off: one line is enough
#define SCENARIOS(X) X(unused) X(idle) X(steady) X(never) X(noted) X(blocking) X(given) X(wrong_thread) X(hammer) \
    X(another_in_between) X(blocked) X(starved) X(starved_later) X(hurry) X(forks) X(no_thread) X(held) X(held_and_refused) X(held_and_given_up) X(crowd) X(pauses) X(call_in_a_crowd) X(detach) X(beside_primary) \
    X(without_primary) X(destroyed) X(call_stands) X(call_fails) X(detach_beside_another) X(among_launches) X(old)
// clang-format on
#define SCENARIO(name) {#name, name},
static const struct {
    const char *name;
    void (*run)(void);
} ALL[] = {SCENARIOS(SCENARIO)};

static int run_in_child(int number, const char *cuda_path) {
    int status = -1;
    const pid_t child = fork();
    if (child == 0) {
        load(cuda_path);
        ALL[number].run();
        exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    if (status != 0) {
        fprintf(stderr, "%s: status %x\n", ALL[number].name, (unsigned)status);
    }
    return status;
}

int main(int argc, char **argv) {
    const int count = (int)(sizeof ALL / sizeof *ALL);
    CHECK(argc >= 3);
    cupti_path = argv[2];
    int failed = 0, run = 0;
    for (int i = 0; i < count; i++) {
        if (argc > 3 ? strcmp(argv[3], ALL[i].name) == 0 : strcmp(ALL[i].name, "old") != 0) {
            failed += run_in_child(i, argv[1]) != 0;
            run++;
        }
    }
    return failed == 0 && run > 0 ? 0 : 1;
}
