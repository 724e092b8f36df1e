/* Drives the collector kit against the fake vendor in one program, for the sanitizers.
 *
 *   drive_kit LENDING_VENDOR PUSHING_VENDOR
 *
 * Captures with several launching threads and a daemon that recycles, both ways of handing records over, each by itself
 * and both at the same time; the same at the limit of a tiny arena; names by pointer and by text; a fork in the middle;
 * buffers that stay out; a flush that takes too long. Exits with 0 if all numbers are right.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "common/arena.h"
#include "fake_vendor.h"
#include "kit/kit.h"
#include "kit/vendor.h"

#define LAUNCHERS 8u
#define LAUNCHES 4000u
#define BUFFER_BYTES (64u << 10)
#define MANY 512u

struct vendor {
    const char *path;
    int (*set)(const char *, long);
    void (*launch)(const char *, uint32_t, uint32_t);
    uint64_t (*written)(void);
    uint64_t (*refused)(void);
    uint64_t (*misused)(void);
    uint64_t (*releases)(void);
};

static void load(struct vendor *vendor, const char *path) {
    void *library = dlopen(path, RTLD_NOW);
    CHECK(library != NULL);
    vendor->path = path;
    *(void **)&vendor->set = dlsym(library, "fake_vendor_set");
    *(void **)&vendor->launch = dlsym(library, "fake_vendor_launch");
    *(void **)&vendor->written = dlsym(library, "fake_vendor_written");
    *(void **)&vendor->refused = dlsym(library, "fake_vendor_refused");
    *(void **)&vendor->misused = dlsym(library, "fake_vendor_misused");
    *(void **)&vendor->releases = dlsym(library, "fake_vendor_releases");
    CHECK(vendor->set != NULL && vendor->launch != NULL && vendor->releases != NULL);
}

/* ---- a daemon: its own mapping, READY -> FREE, and what it saw ---- */

#define KEYS_MOST 64u

struct daemon {
    struct arena view;
    bool headed;
    uint64_t records;
    uint64_t kernels;
    uint64_t keys[KEYS_MOST]; /* of names in records, each once */
    uint32_t key_count;
    uint64_t unnamed;
    atomic_bool ended;
    pthread_t thread;
};

static void see_key(struct daemon *daemon, uint64_t key) {
    daemon->unnamed += key == 0;
    for (uint32_t i = 0; i < daemon->key_count; i++) {
        if (daemon->keys[i] == key) {
            return;
        }
    }
    CHECK(daemon->key_count < KEYS_MOST);
    daemon->keys[daemon->key_count++] = key;
}

static void see_record(struct daemon *daemon, const uint8_t *record, uint32_t kind) {
    struct fake_kernel kernel;
    daemon->records++;
    if (kind == FAKE_KERNEL) {
        memcpy(&kernel, record, sizeof kernel);
        CHECK(kernel.kind == FAKE_KERNEL && kernel.end == kernel.start + 15);
        daemon->kernels++;
        see_key(daemon, kernel.name);
    } else {
        CHECK(kind == FAKE_CALL);
    }
}

static void read_buffer(struct daemon *daemon, uint32_t index) {
    const uint8_t *buffer = arena_buffer(&daemon->view, index);
    const uint64_t valid = *arena_buffer_word(&daemon->view, index, ARENA_BUFFER_VALID_BYTES);
    for (uint64_t at = 0; at < valid;) {
        struct kit_header header;
        memcpy(&header, buffer + at, sizeof header);
        if (!daemon->headed) {
            see_record(daemon, buffer + at, header.kind);
            at += header.kind == FAKE_KERNEL ? sizeof(struct fake_kernel) : sizeof(struct fake_call);
            continue;
        }
        CHECK(header.bytes % 8 == 0 && header.bytes > sizeof header && at + header.bytes <= valid);
        if (header.kind != KIT_KIND_TEXT) {
            see_record(daemon, buffer + at + sizeof header, header.kind);
        }
        at += header.bytes;
    }
}

static void sweep(struct daemon *daemon) {
    for (uint32_t i = 0; i < daemon->view.fixed.buffer_count; i++) {
        if (arena_load_state(&daemon->view, i) == ARENA_READY) {
            read_buffer(daemon, i);
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

static void daemon_begin(struct daemon *daemon, int fd, bool headed) {
    struct stat status;
    memset(daemon, 0, sizeof *daemon);
    CHECK(fstat(fd, &status) == 0);
    daemon->headed = headed;
    daemon->view.base = mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(daemon->view.base != MAP_FAILED);
    memcpy(&daemon->view.fixed, daemon->view.base, sizeof daemon->view.fixed);
    CHECK(pthread_create(&daemon->thread, NULL, recycle, daemon) == 0);
}

/* How many entries of a string space there are; each key of the records must be one, for a text "kernel…". */
static uint32_t check_texts(const struct daemon *daemon, uint32_t space, bool named) {
    const uint8_t *table = daemon->view.base + daemon->view.fixed.strings_offset;
    const uint64_t used = arena_load(&daemon->view, ARENA_STRINGS_USED);
    uint32_t entries = 0, found = 0;
    struct arena_string head;
    for (uint64_t at = 0; at < used; at += sizeof head + ((head.length + 7u) & ~7u)) {
        memcpy(&head, table + at, sizeof head);
        if (head.space != space) {
            continue;
        }
        entries++;
        for (uint32_t i = 0; named && i < daemon->key_count; i++) {
            found += daemon->keys[i] == head.key;
        }
        CHECK(!named || memcmp(table + at + sizeof head, "kernel", 6) == 0);
    }
    CHECK(!named || found == daemon->key_count);
    return entries;
}

static void daemon_end(struct daemon *daemon) {
    atomic_store(&daemon->ended, true);
    pthread_join(daemon->thread, NULL);
    sweep(daemon);
    CHECK(arena_load(&daemon->view, ARENA_CLOSED) == 1);
}

static void daemon_free(struct daemon *daemon) { munmap(daemon->view.base, daemon->view.fixed.total_bytes); }

/* ---- a recording ---- */

struct recording {
    int collector;
    int fd;
    uint64_t written; /* by the vendor before it */
};

static struct recording prepare(const struct vendor *vendor, uint32_t buffers) {
    char error[256] = "";
    uint64_t version = 0;
    struct recording recording = {.written = vendor->written()};
    recording.collector = kc_kit_open(vendor->path, "libfake.so", &version, error, sizeof error);
    CHECK(recording.collector >= 0 && version == 7);
    const struct kit_config config = {.buffer_limit_bytes = (uint64_t)buffers * BUFFER_BYTES,
                                      .buffer_bytes = BUFFER_BYTES,
                                      .strings_bytes = 64u << 10,
                                      .prefault_bytes = BUFFER_BYTES,
                                      .flush_period_ms = 2};
    recording.fd = kc_kit_prepare(recording.collector, &config, error, sizeof error);
    CHECK(recording.fd >= 0);
    return recording;
}

static void start(const struct recording *recording) {
    const uint32_t kinds[] = {FAKE_KERNEL, FAKE_CALL};
    int32_t results[2];
    char error[256] = "";
    CHECK(kc_kit_start(recording->collector, kinds, 2, results, error, sizeof error) == 0);
    CHECK(results[0] == 0 && results[1] == 0);
}

struct launcher {
    const struct vendor *vendor;
    uint32_t stream;
    pthread_t thread;
};

static void *launch(void *argument) {
    const struct launcher *launcher = argument;
    char name[32];
    snprintf(name, sizeof name, "kernel_%u", launcher->stream);
    launcher->vendor->launch(name, LAUNCHES, launcher->stream);
    return NULL;
}

static void launch_from_all_threads(const struct vendor *const *vendors, uint32_t count) {
    struct launcher launchers[2 * LAUNCHERS];
    for (uint32_t i = 0; i < count * LAUNCHERS; i++) {
        launchers[i] = (struct launcher){.vendor = vendors[i / LAUNCHERS], .stream = i % LAUNCHERS};
        CHECK(pthread_create(&launchers[i].thread, NULL, launch, &launchers[i]) == 0);
    }
    for (uint32_t i = 0; i < count * LAUNCHERS; i++) {
        pthread_join(launchers[i].thread, NULL);
    }
}

static struct kit_stop_result stop(const struct recording *recording) {
    struct kit_stop_result stopped;
    CHECK(kc_kit_stop(recording->collector, 20000, &stopped) == 0);
    CHECK(!stopped.timed_out && stopped.irregular_records == 0 && stopped.flush_result == 0);
    return stopped;
}

/* Every record is either with the daemon or counted as dropped. */
static void check_counts(const struct vendor *vendor, const struct recording *recording,
                         const struct kit_stop_result *stopped, const struct daemon *daemon) {
    const uint64_t written = vendor->written() - recording->written;
    CHECK(stopped->withheld == 0);
    CHECK(stopped->counts.records == daemon->records);
    CHECK(stopped->counts.records + stopped->counts.dropped == written || stopped->uncounted > 0);
    CHECK(stopped->counts.records + stopped->counts.dropped <= written);
}

static void capture(const struct vendor *vendor, uint32_t buffers, bool headed) {
    struct daemon daemon;
    const uint64_t releases = vendor->releases();
    const struct recording recording = prepare(vendor, buffers);
    daemon_begin(&daemon, recording.fd, headed);
    start(&recording);
    launch_from_all_threads(&vendor, 1);
    const struct kit_stop_result stopped = stop(&recording);
    daemon_end(&daemon);
    check_counts(vendor, &recording, &stopped, &daemon);
    CHECK(vendor->written() - recording.written == 2ull * LAUNCHERS * LAUNCHES);
    CHECK(vendor->releases() == releases + 1);
    if (buffers == MANY) {
        CHECK(stopped.counts.dropped == 0 && stopped.names_lost == 0 && stopped.uncounted == 0);
        CHECK(daemon.kernels == LAUNCHERS * LAUNCHES && daemon.unnamed == 0);
        CHECK(check_texts(&daemon, FAKE_NAME_SPACE, true) == LAUNCHERS);
        CHECK((check_texts(&daemon, ARENA_SPACE_CLOCK_PAIR, false) >= 2) == headed);
    }
    CHECK(kc_kit_close(recording.collector) == 0);
    daemon_free(&daemon);
}

static void capture_of_both(const struct vendor *first, const struct vendor *second) {
    const struct vendor *const vendors[] = {first, second};
    struct recording recordings[2];
    struct daemon daemons[2];
    for (uint32_t i = 0; i < 2; i++) {
        recordings[i] = prepare(vendors[i], MANY);
        daemon_begin(&daemons[i], recordings[i].fd, i == 1);
        start(&recordings[i]);
    }
    CHECK(recordings[0].collector != recordings[1].collector);
    launch_from_all_threads(vendors, 2);
    for (uint32_t i = 0; i < 2; i++) {
        const struct kit_stop_result stopped = stop(&recordings[i]);
        daemon_end(&daemons[i]);
        check_counts(vendors[i], &recordings[i], &stopped, &daemons[i]);
        CHECK(stopped.counts.dropped == 0);
        CHECK(kc_kit_close(recordings[i].collector) == 0);
        daemon_free(&daemons[i]);
    }
}

static void fork_while_recording(const struct vendor *vendor) {
    struct kit_stop_result stopped;
    const struct recording recording = prepare(vendor, 16);
    start(&recording);
    vendor->launch("kernel_before", 10, 0);
    const pid_t child = fork();
    if (child == 0) {
        char error[256];
        uint64_t version;
        vendor->launch("kernel_in_child", 2000, 0);
        const bool refused = kc_kit_close(recording.collector) == KC_FORKED &&
                             kc_kit_stop(recording.collector, 1, &stopped) == KC_FORKED &&
                             kc_kit_open(vendor->path, "", &version, error, sizeof error) == KC_FORKED;
        _exit(refused && vendor->misused() == 0 ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    vendor->launch("kernel_after", 10, 0);
    CHECK(stop(&recording).counts.records == 40);
    CHECK(kc_kit_close(recording.collector) == 0);
}

static void keep_a_buffer_across_captures(const struct vendor *vendor) {
    const uint64_t releases = vendor->releases();
    CHECK(vendor->set("hold_a_buffer", 1) == 0);
    struct recording recording = prepare(vendor, 64);
    start(&recording);
    vendor->launch("kernel_kept", 5, 0);
    CHECK(stop(&recording).withheld == 1);
    CHECK(vendor->releases() == releases);
    CHECK(kc_kit_close(recording.collector) == 0);
    CHECK(vendor->set("hold_a_buffer", 0) == 0);
    recording = prepare(vendor, 64);
    start(&recording);
    vendor->launch("kernel_next", 5, 1);
    CHECK(stop(&recording).counts.records == 20);
    CHECK(kc_kit_close(recording.collector) == 0);
}

static void go_on_after_a_start_that_failed(const struct vendor *vendor) {
    const uint32_t kinds[] = {FAKE_KERNEL};
    int32_t result = 0;
    char error[256] = "";
    CHECK(vendor->set("start_fails", 1) == 0);
    struct recording recording = prepare(vendor, 16);
    CHECK(kc_kit_start(recording.collector, kinds, 1, &result, error, sizeof error) == KC_VENDOR);
    CHECK(result == FAKE_REFUSED && strcmp(error, "the fake vendor records none of these") == 0);
    CHECK(kc_kit_close(recording.collector) == 0);
    CHECK(vendor->set("start_fails", 0) == 0);
    recording = prepare(vendor, 16);
    start(&recording);
    vendor->launch("kernel", 3, 0);
    CHECK(stop(&recording).counts.records == 6);
    CHECK(kc_kit_close(recording.collector) == 0);
}

static void go_on_after_a_flush_that_took_too_long(const struct vendor *vendor) {
    struct kit_stop_result stopped;
    char error[256];
    uint64_t version;
    CHECK(vendor->set("flush_delay_ms", 300) == 0);
    const struct recording recording = prepare(vendor, 16);
    start(&recording);
    CHECK(kc_kit_stop(recording.collector, 1, &stopped) == 0 && stopped.timed_out);
    CHECK(kc_kit_close(recording.collector) == KC_ORDER);
    CHECK(kc_kit_open(vendor->path, "", &version, error, sizeof error) == KC_ORDER);
    CHECK(strstr(error, "has not ended the previous recording yet") != NULL);
    CHECK(vendor->set("flush_delay_ms", 0) == 0);
    while (kc_kit_open(vendor->path, "", &version, error, sizeof error) == KC_ORDER) {
        usleep(1000);
    }
    const struct recording next = prepare(vendor, 16);
    start(&next);
    vendor->launch("kernel", 3, 0);
    CHECK(stop(&next).counts.records == 6);
    CHECK(kc_kit_close(next.collector) == 0);
}

/* As another profiler of the program does, on its own thread, while records come and the agent stops, too. */
static void *give_way(void *argument) {
    (void)stop(argument);
    return NULL;
}

static void give_way_while_recording(const struct vendor *vendor) {
    struct recording recording = prepare(vendor, 64);
    struct launcher launcher = {.vendor = vendor, .stream = 3};
    pthread_t other;
    start(&recording);
    CHECK(pthread_create(&launcher.thread, NULL, launch, &launcher) == 0);
    CHECK(pthread_create(&other, NULL, give_way, &recording) == 0);
    const struct kit_stop_result first = stop(&recording);
    pthread_join(other, NULL);
    pthread_join(launcher.thread, NULL);
    const struct kit_stop_result again = stop(&recording);
    CHECK(memcmp(&first, &again, sizeof first) == 0);
    CHECK(again.counts.records + again.counts.dropped <= vendor->written() - recording.written);
    CHECK(kc_kit_close(recording.collector) == 0);
}

static void exit_while_recording(const struct vendor *vendor) {
    const struct recording recording = prepare(vendor, 16);
    start(&recording);
    vendor->launch("kernel_last", 100, 0);
}

int main(int count, char **arguments) {
    struct vendor lends, pushes;
    CHECK(count == 3);
    load(&lends, arguments[1]);
    load(&pushes, arguments[2]);
    for (uint32_t i = 0; i < 2; i++) {
        const struct vendor *vendor = i == 0 ? &lends : &pushes;
        capture(vendor, MANY, i == 1);
        capture(vendor, MANY, i == 1);
        capture(vendor, 2, i == 1); /* records are dropped */
        fork_while_recording(vendor);
        go_on_after_a_start_that_failed(vendor);
        go_on_after_a_flush_that_took_too_long(vendor);
        give_way_while_recording(vendor);
    }
    CHECK(lends.refused() == 0); /* it could not have been declined */
    keep_a_buffer_across_captures(&lends);
    CHECK(lends.set("by_text", 1) == 0);
    capture(&lends, MANY, false);
    CHECK(lends.set("when_full", KIT_FULL_SPILLS) == 0);
    capture(&lends, 2, false);
    CHECK(lends.set("when_full", KIT_FULL_DECLINES) == 0);
    capture(&lends, 2, false);
    CHECK(lends.refused() > 0);
    capture_of_both(&lends, &pushes);
    CHECK(lends.misused() == 0 && pushes.misused() == 0);
    exit_while_recording(&lends);
    exit_while_recording(&pushes);
    return 0;
}
