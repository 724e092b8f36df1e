/* Drives the collector against the fake libcupti in one program, for the sanitizers.
 *
 *   drive_collector LIBCUPTI
 *
 * Captures with several launching threads and a daemon that recycles, the same at the limit of a tiny arena (with
 * both kinds of CUPTI), a fork in the middle, detaches that succeed, expire and race. Exits with 0 if all numbers
 * are right.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/arena.h"
#include "check.h"
#include "cupti/collector.h"

#define LAUNCHERS 8u
#define LAUNCHES 5000u
#define BUFFER_BYTES (256u << 10)
#define RUNTIME_DOMAIN 2u

static struct {
    int (*set)(const char *, long);
    void (*launch_many)(const char *, uint32_t, uint64_t, uint32_t);
    uint32_t (*memset)(uint64_t, uint64_t, uint32_t);
    uint64_t (*dropped)(void);
    uint64_t (*misused)(void);
} fake;

static const char *library_path;
static atomic_bool calls_go_on;

static void *symbol(void *library, const char *name) {
    void *found = dlsym(library, name);
    CHECK(found != NULL);
    return found;
}

static void load_fake(void) {
    void *library = dlopen(library_path, RTLD_NOW | RTLD_GLOBAL);
    CHECK(library != NULL);
    *(void **)&fake.set = symbol(library, "fake_set");
    *(void **)&fake.launch_many = symbol(library, "fake_launch_many");
    *(void **)&fake.memset = symbol(library, "fake_memset");
    *(void **)&fake.dropped = symbol(library, "fake_dropped");
    *(void **)&fake.misused = symbol(library, "fake_misused");
}

static void *launch(void *argument) {
    const uint32_t stream = (uint32_t)(uintptr_t)argument;
    char name[32];
    snprintf(name, sizeof name, "kernel_%u", stream);
    fake.launch_many(name, LAUNCHES, 100, stream);
    return NULL;
}

static void *keep_calling(void *unused) {
    (void)unused;
    while (atomic_load(&calls_go_on)) {
        fake.memset(1, 1, 0);
        usleep(200);
    }
    return NULL;
}

/* A daemon: its own mapping, READY -> FREE, and the sum of the records it saw. */
struct daemon {
    struct arena view;
    uint64_t records;
    atomic_bool ended;
    pthread_t thread;
};

static void sweep(struct daemon *daemon) {
    for (uint32_t i = 0; i < daemon->view.fixed.buffer_count; i++) {
        if (arena_load_state(&daemon->view, i) == ARENA_READY) {
            daemon->records += *arena_buffer_word(&daemon->view, i, ARENA_BUFFER_RECORDS);
            arena_set_state(&daemon->view, i, ARENA_FREE);
        }
    }
}

static void *recycle(void *argument) {
    struct daemon *daemon = argument;
    while (!atomic_load(&daemon->ended)) {
        sweep(daemon);
        usleep(100);
    }
    return NULL;
}

static void daemon_begin(struct daemon *daemon, int fd) {
    struct stat status;
    memset(daemon, 0, sizeof *daemon);
    CHECK(fstat(fd, &status) == 0);
    daemon->view.base = mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(daemon->view.base != MAP_FAILED);
    memcpy(&daemon->view.fixed, daemon->view.base, sizeof daemon->view.fixed);
    CHECK(pthread_create(&daemon->thread, NULL, recycle, daemon) == 0);
}

static uint64_t daemon_end(struct daemon *daemon) {
    atomic_store(&daemon->ended, true);
    pthread_join(daemon->thread, NULL);
    sweep(daemon);
    munmap(daemon->view.base, daemon->view.fixed.total_bytes);
    return daemon->records;
}

static int prepare(uint32_t buffers, long version) {
    static const char PATTERNS[] = "cudaLaunch*\0cudaMem*\0";
    char error[256] = "";
    uint32_t seen = 0;
    CHECK(fake.set("version", version) == 0);
    CHECK(kc_open(library_path, &seen, error, sizeof error) == 0);
    CHECK(seen == (uint32_t)version);
    const struct kc_config config = {.buffer_limit_bytes = (uint64_t)buffers * BUFFER_BYTES,
                                     .buffer_bytes = BUFFER_BYTES,
                                     .strings_bytes = 64u << 10,
                                     .prefault_bytes = BUFFER_BYTES,
                                     .flush_period_ms = 2,
                                     .kernel_name_offset = 104,
                                     .may_decline = version >= 27};
    const int fd = kc_prepare(&config, error, sizeof error);
    CHECK(fd >= 0);
    CHECK(kc_keep_calls(RUNTIME_DOMAIN, PATTERNS, sizeof PATTERNS) == 0);
    return fd;
}

static void start(void) {
    const uint32_t kinds[] = {10, 2};
    int32_t results[2], subscribed = -1;
    char error[256] = "";
    CHECK(kc_subscribe(&subscribed) == 0 && subscribed == 0);
    CHECK(kc_start(kinds, 2, results, error, sizeof error) == 0);
    CHECK(results[0] == 0 && results[1] == 0);
    CHECK(kc_record_calls(error, sizeof error) == 0);
}

static void launch_from_all_threads(void) {
    pthread_t threads[LAUNCHERS];
    for (uintptr_t i = 0; i < LAUNCHERS; i++) {
        CHECK(pthread_create(&threads[i], NULL, launch, (void *)i) == 0);
    }
    for (uint32_t i = 0; i < LAUNCHERS; i++) {
        pthread_join(threads[i], NULL);
    }
}

static void detach(void) {
    struct kc_detach_result detached;
    pthread_t caller;
    atomic_store(&calls_go_on, true);
    CHECK(pthread_create(&caller, NULL, keep_calling, NULL) == 0);
    CHECK(kc_detach(20000, &detached) == 0);
    atomic_store(&calls_go_on, false);
    pthread_join(caller, NULL);
    CHECK(detached.outcome == KC_DETACHED);
}

/* Every record is either with the daemon or counted as dropped. */
static void capture(uint32_t buffers, long version) {
    struct daemon daemon;
    struct kc_stop_result stopped;
    daemon_begin(&daemon, prepare(buffers, version));
    start();
    launch_from_all_threads();
    CHECK(kc_stop(20000, &stopped) == 0);
    CHECK(!stopped.timed_out && stopped.withheld == 0 && stopped.irregular_records == 0 && stopped.names_lost == 0);
    CHECK(stopped.counts.records == daemon_end(&daemon));
    CHECK(stopped.counts.records + stopped.counts.dropped == 2ull * LAUNCHERS * LAUNCHES);
    detach();
    CHECK(kc_close() == 0);
}

static void fork_while_recording(void) {
    struct kc_stop_result stopped;
    (void)prepare(16, 130001);
    start();
    fake.launch_many("before", 10, 1, 0);
    const pid_t child = fork();
    if (child == 0) {
        _exit(kc_close() == KC_FORKED && kc_stop(1, &stopped) == KC_FORKED ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    fake.launch_many("after", 10, 1, 0);
    CHECK(kc_stop(20000, &stopped) == 0);
    CHECK(stopped.counts.records == 40);
    CHECK(kc_close() == 0);
}

static void race_detaches_with_their_limit(void) {
    atomic_store(&calls_go_on, true);
    pthread_t caller;
    CHECK(pthread_create(&caller, NULL, keep_calling, NULL) == 0);
    for (int i = 0; i < 50; i++) {
        struct kc_stop_result stopped;
        struct kc_detach_result detached;
        (void)prepare(2, 130001);
        start();
        CHECK(kc_stop(20000, &stopped) == 0);
        CHECK(kc_detach(i % 2, &detached) == 0);
        CHECK(detached.outcome == KC_DETACHED || detached.outcome == KC_DETACH_NO_CALL);
        CHECK(kc_close() == 0);
    }
    atomic_store(&calls_go_on, false);
    pthread_join(caller, NULL);
}

static void keep_a_buffer_across_captures(void) {
    struct kc_stop_result stopped;
    CHECK(fake.set("hold_a_buffer", 1) == 0);
    (void)prepare(64, 130001);
    start();
    fake.launch_many("kept", 5, 1, 0);
    CHECK(kc_stop(20000, &stopped) == 0);
    CHECK(stopped.withheld == 1);
    CHECK(kc_close() == 0);
    CHECK(fake.set("hold_a_buffer", 0) == 0);
    (void)prepare(64, 130001); /* nobody empties the buffers: enough for every flush */
    start();
    fake.launch_many("next", 5, 1, 0);
    CHECK(kc_stop(20000, &stopped) == 0);
    CHECK(stopped.counts.records == 15); /* 5 kernels were kept, their calls were not */
    detach();
    CHECK(kc_close() == 0);
}

static void exit_while_recording(void) {
    (void)prepare(16, 130001);
    start();
    fake.launch_many("last", 100, 1, 0);
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    library_path = arguments[1];
    load_fake();
    capture(256, 130001);
    capture(256, 130001);
    capture(2, 130001); /* records are dropped by CUPTI */
    capture(2, 26);     /* and through the spill buffers */
    fork_while_recording();
    race_detaches_with_their_limit();
    keep_a_buffer_across_captures();
    CHECK(fake.misused() == 0);
    exit_while_recording();
    return 0;
}
