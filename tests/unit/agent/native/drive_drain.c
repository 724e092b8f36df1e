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
#include "fake_driver.h"

/* ---- the queue ---- */

static void unused(void) {
    driver.set(FAKE_CONTEXTS, 0);
    CHECK(outcome() == KC_DRAIN_SHORT);
    CHECK(driver.recorded() == 0 && driver.intact());
}

static void idle(void) {
    CHECK(outcome() == KC_DRAIN_SHORT);
    CHECK(driver.recorded() > 0 && !driver.intact());
    ends();
}

static void steady(void) {
    driver.set(FAKE_STEADY_MS, 60);
    const struct kc_drain_result result = drain(1200, NULL, 0);
    CHECK(result.outcome == KC_DRAIN_SOON && result.queued_ns >= 60 * NS_PER_MS);
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
    CHECK(drain(300, streams, 64).outcome == KC_DRAIN_NOT);
    free(streams);
    driver.set(FAKE_BLOCK_CREATE, 1);
    driver.set(FAKE_BLOCK_RETAIN, 0);
    CHECK(outcome() == KC_DRAIN_NOT);
    CHECK(outcome() == KC_DRAIN_NOT);
    CHECK(threads_that_ask() == 1);
    driver.set(FAKE_BLOCK_CREATE, 0);
    CHECK(outcome() == KC_DRAIN_SHORT);
    UNTIL(threads_that_ask() == 0);
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
    CHECK(result == KC_DRAIN_NOT && clock_ns(CLOCK_MONOTONIC) - begin < PATIENCE_NS);
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

/* ---- launches ---- */

/* A program that queues 100 ms at once, whenever nothing is left of them. */
static int64_t each_ns = 5 * NS_PER_MS;

static void *launch_batches(void *unused_argument) {
    (void)unused_argument;
    while (atomic_load(&goes_on)) {
        const int64_t end = clock_ns(CLOCK_MONOTONIC) + (BATCH + 1) * 5 * NS_PER_MS;
        for (unsigned i = 0; i < BATCH; i++) {
            CHECK(driver.launch(i, i + 1, i + 2, i + 3, i + 4, i + 5, i + 6, i + 7, i + 8, i + 9, &each_ns) == 0);
        }
        CHECK(driver.launch_graph(&each_ns, STREAM) == 0);
        while (clock_ns(CLOCK_MONOTONIC) < end) {
            pause_us(100);
        }
    }
    return NULL;
}

static void prepare(void) {
    static const struct kc_config CONFIG = {.buffer_limit_bytes = 4 << 20,
                                            .buffer_bytes = 256 << 10,
                                            .strings_bytes = 1 << 20,
                                            .flush_period_ms = 10,
                                            .kernel_name_offset = 104,
                                            .may_decline = 1};
    uint32_t version = 0;
    char error[256];
    CHECK(kc_open(cupti_path, &version, error, sizeof error) == 0);
    CHECK(kc_prepare(&CONFIG, error, sizeof error) >= 0);
}

static pthread_t deep_program(void) {
    pthread_t thread;
    atomic_store(&goes_on, true);
    CHECK(pthread_create(&thread, NULL, launch_batches, NULL) == 0);
    UNTIL(driver.launched() > BATCH);
    struct kc_drain_result result;
    do { /* 1 ms: a queue of 100 ms is never little enough */
        result = drain(1, NULL, 0);
    } while (result.outcome != KC_DRAIN_SHORT || result.queued_ns < 21 * NS_PER_MS);
    prepare();
    return thread;
}

static void stop_program(pthread_t thread) {
    const unsigned before = driver.launched();
    UNTIL(driver.launched() > before + BATCH);
    atomic_store(&goes_on, false);
    CHECK(pthread_join(thread, NULL) == 0);
    ends();
}

static void *run_subscribe(void *code) {
    int32_t result = 0;
    for (int tries = 0; (*(int *)code = kc_subscribe(&result)) == KC_BUSY && tries < 50 && !driver.blocked(); tries++) {
    }
    return NULL;
}

/* As it takes CUPTI's first call 30 ms, the launches of the program are seen to be held. */
static void hold(long refused) {
    pthread_t subscriber;
    int code = -1;
    fake.set("enter_delay_ms", 30);
    fake.set("subscribe_result", refused);
    const pthread_t program = deep_program();
    bool held = false;
    CHECK(pthread_create(&subscriber, NULL, run_subscribe, &code) == 0);
    while (pthread_tryjoin_np(subscriber, NULL) != 0) {
        held |= driver.launches_held() != 0;
        pause_us(100);
    }
    CHECK(held && code == (refused ? KC_CUPTI : 0));
    CHECK(!driver.launches_held());
    stop_program(program);
}

static void held(void) { hold(0); }
static void held_and_refused(void) { hold(39); }

/* Who asked gives up while launches are held: they go on, at first because their time is over. */
static void held_and_given_up(void) {
    static const int64_t NOTHING;
    pthread_t subscriber;
    int code = -1;
    const pthread_t program = deep_program();
    driver.set(FAKE_BLOCK_HELD, 1);
    CHECK(pthread_create(&subscriber, NULL, run_subscribe, &code) == 0);
    UNTIL(driver.launches_held() && driver.blocked());
    UNTIL((kc_hurry(), pthread_tryjoin_np(subscriber, NULL) == 0));
    CHECK(code == KC_BUSY && driver.launches_held());
    __atomic_store_n(&each_ns, 0, __ATOMIC_SEQ_CST); /* so that the moment comes all the same */
    CHECK(driver.launch(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, &NOTHING) == 0);
    driver.set(FAKE_BLOCK_HELD, 0);
    UNTIL(!driver.launches_held());
    UNTIL((kc_close(), driver.intact()));
    stop_program(program);
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
    char error[256];
    CHECK(outcome() == KC_DRAIN_SHORT);
    prepare();
    CHECK(kc_subscribe(&result) == 0 && result == 0);
    CHECK(kc_start(&MEMSET, 1, &result, error, sizeof error) == 0);
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

// clang-format off: one line is enough
#define SCENARIOS(X) X(unused) X(idle) X(steady) X(never) X(noted) X(blocking) X(given) X(wrong_thread) X(hammer) \
    X(another_in_between) X(blocked) X(hurry) X(forks) X(no_thread) X(held) X(held_and_refused) X(held_and_given_up) X(detach) X(old)
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
