/* What the scenarios of drive_drain.c share: the fake driver and the fake libcupti, and what is true at their end; and those
 * with contexts that are not primary, or in which launches are held. */
#ifndef DRAIN_PROGRAM_H
#define DRAIN_PROGRAM_H

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
#include "common/wake.h"
#include "cupti/capture_gate.h"
#include "cupti/collector.h"
#include "cupti/device_drain.h"
#include "cupti/driver_slots.h"
#include "cupti/launches.h"
#include "fake_driver.h"

#define NS_PER_MS 1000000LL
#define PATIENCE_NS (1500 * NS_PER_MS) /* collector.c */
#define BATCH 20
#define GRAPHS 100 /* that would wait 20 ms each if a moment were held for ever */
#define STREAM 0x2000u
#define BLOCKING_STREAM 0x100u
enum { GLOBAL = 0, THREAD_LOCAL = 1, WRONG_THREAD = 908 };

static const char *cupti_path;
static void *cuda;
static struct {
    void (*set)(enum fake_driver_setting, int);
    int (*blocked)(void);
    unsigned (*harmed)(void);
    unsigned (*garbled)(void);
    unsigned (*launched)(void);
    unsigned (*recorded)(void);
    int (*intact)(void);
    void (*is_held)(int (*)(void));
    unsigned (*stale)(void);
    int (*set_current)(void *);
    int (*destroy)(void *);
    int (*begin)(uintptr_t);
    int (*begin_v2)(uintptr_t, int);
    int (*begin_v2_ptsz)(uintptr_t, int);
    int (*begin_to)(uintptr_t, uintptr_t, uintptr_t, uintptr_t, size_t, int);
    int (*end)(uintptr_t, void **);
    int (*end_ptsz)(uintptr_t, void **);
    int (*launch)(uintptr_t, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, uintptr_t, uintptr_t,
                  const int64_t *);
    int (*launch_graph)(const int64_t *, uintptr_t);
    int (*record)(void *, void *);
} driver;
static struct {
    int (*set)(const char *, long);
    uint32_t (*launch)(const char *, uint64_t, uint32_t);
    uint32_t (*memset)(uint64_t, uint64_t, uint32_t);
    int (*subscribed)(void);
    uint64_t (*misused)(void);
} fake;
static atomic_bool goes_on;

static void load(const char *cuda_path) {
    static const struct {
        void *function;
        const char *name;
    } WANTED[] = {
        {&driver.set, "fake_driver_set"},
        {&driver.blocked, "fake_driver_blocked"},
        {&driver.harmed, "fake_driver_harmed"},
        {&driver.garbled, "fake_driver_garbled"},
        {&driver.launched, "fake_driver_launched"},
        {&driver.recorded, "fake_driver_recorded"},
        {&driver.intact, "fake_driver_intact"},
        {&driver.is_held, "fake_driver_is_held"},
        {&driver.stale, "fake_driver_stale"},
        {&driver.set_current, "cuCtxSetCurrent"},
        {&driver.destroy, "cuCtxDestroy_v2"},
        {&driver.begin, "cuStreamBeginCapture"},
        {&driver.begin_v2, "cuStreamBeginCapture_v2"},
        {&driver.begin_v2_ptsz, "cuStreamBeginCapture_v2_ptsz"},
        {&driver.begin_to, "cuStreamBeginCaptureToGraph"},
        {&driver.end, "cuStreamEndCapture"},
        {&driver.end_ptsz, "cuStreamEndCapture_ptsz"},
        {&driver.launch, "cuLaunchKernel"},
        {&driver.launch_graph, "cuGraphLaunch"},
        {&driver.record, "cuCtxRecordEvent"},
        {&fake.set, "fake_set"},
        {&fake.launch, "fake_driver_launch"},
        {&fake.memset, "fake_memset"},
        {&fake.subscribed, "fake_subscribed"},
        {&fake.misused, "fake_misused"},
    };
    void *cupti = dlopen(cupti_path, RTLD_NOW | RTLD_LOCAL);
    cuda = dlopen(cuda_path, RTLD_NOW | RTLD_LOCAL);
    CHECK(cupti != NULL && cuda != NULL);
    for (size_t i = 0; i < sizeof WANTED / sizeof *WANTED; i++) {
        void *in_cuda = dlsym(cuda, WANTED[i].name);
        void *found = in_cuda != NULL ? in_cuda : dlsym(cupti, WANTED[i].name);
        CHECK(found != NULL || strcmp(WANTED[i].name, "cuCtxRecordEvent") == 0);
        *(void **)WANTED[i].function = found;
    }
    driver.set(FAKE_CONTEXTS, 2);
}

static void pause_us(long us) { nanosleep(&(struct timespec){0, us * 1000}, NULL); }

/* Each try waits by itself. */
#define WITHIN(most, condition)                        \
    do {                                               \
        for (int tries = 0; !(condition); tries++) {   \
            CHECK(tries < (most) || !"is so by then"); \
        }                                              \
    } while (0)

#define UNTIL(condition)                                     \
    do {                                                     \
        for (int tries = 0; !(condition); tries++) {         \
            CHECK(tries < 60000 || !"is so after a minute"); \
            pause_us(1000);                                  \
        }                                                    \
    } while (0)

static struct kc_drain_result drain(uint32_t limit_ms, const uint64_t *streams, uint32_t count) {
    const struct kc_drain_wish wish = {limit_ms, 0, count};
    struct kc_drain_result result;
    CHECK(kc_drain(&wish, streams, &result) == 0);
    return result;
}

static int outcome(void) { return drain(300, NULL, 0).outcome; }

static int outcome_after(uint32_t settle_ms) {
    const struct kc_drain_wish wish = {300, settle_ms, 0};
    struct kc_drain_result result;
    CHECK(kc_drain(&wish, NULL, &result) == 0);
    return result.outcome;
}

static void *run_drain(void *result) {
    *(int *)result = outcome();
    return NULL;
}

static int threads_that_ask(void) {
    int count = 0;
    char path[300], name[20];
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks != NULL);
    for (struct dirent *task; (task = readdir(tasks)) != NULL;) {
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
        FILE *comm = fopen(path, "r");
        count += comm != NULL && fgets(name, sizeof name, comm) != NULL && strcmp(name, "kineto-drain\n") == 0;
        if (comm != NULL) {
            fclose(comm);
        }
    }
    closedir(tasks);
    return count;
}

static void ends(void) {
    CHECK(kc_close() == 0);
    UNTIL(threads_that_ask() == 0);
    CHECK(driver.intact());
    CHECK(driver.harmed() == 0 && driver.garbled() == 0 && driver.stale() == 0);
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

/* ---- contexts of cuCtxCreate ---- */

#define OTHER 0x10u

static void *launch_into_another(void *unused_argument) {
    static const int64_t NOTHING;
    (void)unused_argument;
    CHECK(driver.set_current((void *)OTHER) == 0);
    while (atomic_load(&goes_on)) {
        CHECK(driver.launch(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, &NOTHING) == 0);
        pause_us(100);
    }
    return NULL;
}

/* Waits until something was launched, however slow this machine is. */
static int outcome_of_others(void) { return outcome_after(100); }

static void another_context(int primary) {
    pthread_t thread;
    driver.set(FAKE_CONTEXTS, primary);
    driver.set(FAKE_OTHER_NEVER, 1);
    atomic_store(&goes_on, true);
    CHECK(pthread_create(&thread, NULL, launch_into_another, NULL) == 0);
    UNTIL(driver.launched() > 0);
    UNTIL(outcome_of_others() == KC_DRAIN_NOT);
    driver.set(FAKE_OTHER_NEVER, 0);
    CHECK(outcome_of_others() == KC_DRAIN_SHORT);
    atomic_store(&goes_on, false);
    CHECK(pthread_join(thread, NULL) == 0);
    ends();
}

static void beside_primary(void) { another_context(1); }
static void without_primary(void) { another_context(0); }

static atomic_uint late; /* our thread got no CPU for so long that a destroyed context was not waited with */

static void *come_and_go(void *first) {
    static const int64_t NOTHING;
    for (uintptr_t handle = (uintptr_t)first; atomic_load(&goes_on); handle += 4) {
        CHECK(driver.set_current((void *)handle) == 0); // NOLINT: a handle
        for (int i = 0; i < 3; i++) {
            CHECK(driver.launch(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, &NOTHING) == 0);
            pause_us(300);
        }
        const int64_t begin = clock_ns(CLOCK_MONOTONIC);
        CHECK(driver.destroy((void *)handle) == 0); // NOLINT
        atomic_fetch_add(&late, clock_ns(CLOCK_MONOTONIC) - begin >= 20 * NS_PER_MS);
    }
    return NULL;
}

static void destroyed(void) {
    pthread_t all[2];
    unsigned before = 0;
    atomic_store(&goes_on, true);
    for (uintptr_t i = 0; i < 2; i++) {
        CHECK(pthread_create(&all[i], NULL, come_and_go, (void *)(OTHER + i)) == 0);
    }
    driver.set(FAKE_STEADY_MS, 5);
    for (int i = 0; i < 4; i++) {
        const int found = outcome();
        CHECK(found == KC_DRAIN_SOON || found == KC_DRAIN_SHORT || found == KC_DRAIN_NOT);
        CHECK((driver.stale() == 0 || atomic_load(&late) > 0) && driver.recorded() > before);
        before = driver.recorded();
    }
    atomic_store(&goes_on, false);
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_join(all[i], NULL) == 0);
    }
    CHECK(kc_close() == 0);
    CHECK(driver.intact());
}

/* ---- launches ---- */

static int are_held(void) { return launches_are_held(); }

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

static void *launch_without_a_pause(void *unused_argument) {
    static const int64_t NOTHING;
    (void)unused_argument;
    CHECK(driver.set_current((void *)OTHER) == 0);
    while (atomic_load(&goes_on)) {
        CHECK(driver.launch(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, &NOTHING) == 0);
    }
    return NULL;
}

static bool all_wait(void) {
    launches_hold(100 * NS_PER_MS);
    const unsigned before = driver.launched();
    pause_us(5000);
    return driver.launched() == before;
}

static void crowd(void) {
    pthread_t all[64];
    uint32_t generation;
    atomic_store(&goes_on, true);
    for (int i = 0; i < 64; i++) {
        CHECK(pthread_create(&all[i], NULL, launch_without_a_pause, NULL) == 0);
    }
    UNTIL(outcome() == KC_DRAIN_SHORT && context_noted(0, &generation) == (void *)OTHER);
    CHECK(context_noted(1, &generation) == NULL); /* all of them have noted it once */
    UNTIL(all_wait());
    launches_release(launches_held_until_ns());
    const unsigned before = driver.launched();
    UNTIL(driver.launched() > before + 64);
    atomic_store(&goes_on, false);
    for (int i = 0; i < 64; i++) {
        CHECK(pthread_join(all[i], NULL) == 0);
    }
    ends();
}

/* Eight threads whose launches are watched, until stop_crowd. */
static pthread_t crowd_of_eight[8];

static void start_crowd(void) {
    atomic_store(&goes_on, true);
    for (int i = 0; i < 8; i++) {
        CHECK(pthread_create(&crowd_of_eight[i], NULL, launch_without_a_pause, NULL) == 0);
    }
    UNTIL(outcome() == KC_DRAIN_SHORT);
}

static void stop_crowd(void) {
    atomic_store(&goes_on, false);
    for (int i = 0; i < 8; i++) {
        CHECK(pthread_join(crowd_of_eight[i], NULL) == 0);
    }
    ends();
}

static bool never_over(void *unused_argument) {
    (void)unused_argument;
    return false;
}

static void pauses(void) {
    struct launch_pauses all;
    start_crowd();
    WITHIN(100, (all = (struct launch_pauses){0, 0}, launches_pause(&all, never_over, NULL),
                 all.length_ns == 20 * NS_PER_MS && all.in_vain == 0));
    all = (struct launch_pauses){320 * NS_PER_MS, 0};
    launches_pause(&all, never_over, NULL);
    const int64_t begin = clock_ns(CLOCK_MONOTONIC);
    for (int i = 0; i < 10; i++) {
        launches_pause(&all, never_over, NULL);
    }
    CHECK(clock_ns(CLOCK_MONOTONIC) - begin < 3200 * NS_PER_MS);
    CHECK(!launches_are_held());
    stop_crowd();
}

static atomic_uint let_go; /* before the hold's time was over */

static void watch_hold(void) {
    const int64_t until_ns = launches_held_until_ns();
    while (launches_held_until_ns() == until_ns && clock_ns(CLOCK_MONOTONIC) < until_ns) {
        pause_us(500);
    }
    atomic_fetch_add(&let_go, clock_ns(CLOCK_MONOTONIC) < until_ns);
}

static void nothing(void) {}

static void call_in_a_crowd(void) {
    struct kc_drain_result result;
    const struct drain_wish wish = {
        .limit_ns = 300 * NS_PER_MS, .patience_ns = PATIENCE_NS, .call = watch_hold, .undo = nothing};
    driver.is_held(are_held);
    start_crowd();
    driver.set(FAKE_STARVED, 1);
    bool late = false; /* whoever waits for longer than its patience lets launches go */
    for (int i = 0; i < 10; i++) {
        drain_await(&wish, &result);
        late = late || result.outcome == KC_DRAIN_CALLED;
    }
    driver.set(FAKE_STARVED, 0);
    CHECK(atomic_load(&let_go) == 0 || late);
    stop_crowd();
}

static void *run_subscribe(void *code) {
    int32_t result = 0;
    for (int tries = 0; (*(int *)code = kc_subscribe(&result)) == KC_BUSY && tries < 50 && !driver.blocked(); tries++) {
    }
    return NULL;
}

/* As CUPTI's first call takes 80 of the 100 ms, the launches of the program are seen to be held. */
static void hold(long refused) {
    pthread_t subscriber;
    int code = -1;
    fake.set("enter_delay_ms", 80);
    fake.set("subscribe_result", refused);
    const pthread_t program = deep_program();
    bool held = false;
    CHECK(pthread_create(&subscriber, NULL, run_subscribe, &code) == 0);
    while (pthread_tryjoin_np(subscriber, NULL) != 0) {
        const int64_t until_ns = launches_held_until_ns();
        const unsigned before = driver.launched();
        pause_us(2000);
        const unsigned after = driver.launched();
        if (until_ns != 0 && launches_held_until_ns() == until_ns && clock_ns(CLOCK_MONOTONIC) < until_ns) {
            CHECK(after <= before + 1);
            held = true;
        }
    }
    CHECK(held && code == (refused ? KC_CUPTI : 0));
    CHECK(!launches_are_held());
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
    driver.is_held(are_held);
    driver.set(FAKE_BLOCK_HELD, 1);
    CHECK(pthread_create(&subscriber, NULL, run_subscribe, &code) == 0);
    UNTIL(launches_are_held() && driver.blocked());
    UNTIL((kc_hurry(), pthread_tryjoin_np(subscriber, NULL) == 0));
    CHECK(code == KC_BUSY && launches_held_until_ns() != 0);
    __atomic_store_n(&each_ns, 0, __ATOMIC_SEQ_CST); /* so that the moment comes all the same */
    CHECK(driver.launch(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, &NOTHING) == 0);
    driver.set(FAKE_BLOCK_HELD, 0);
    UNTIL(launches_held_until_ns() == 0);
    UNTIL((kc_close(), driver.intact()));
    stop_program(program);
}

#endif
