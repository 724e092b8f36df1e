/* Drives the collector against the fake ROCm in one program, for the sanitizers and for long runs.
 *
 *   drive_rocprofiler FOLDER [LAUNCHES [CYCLES]]
 *
 * FOLDER has both fake libraries; KINETO_FAKE_ROCPROFILER chooses the version. The program's kernels run before we come
 * where that version lets us come late. LAUNCHES kernels on several threads are recorded while a daemon recycles
 * buffers, and every start and end is compared with the fake's own log. Then: CYCLES recordings whose memory and
 * descriptors must not grow, the limit of a tiny arena, records of a size that nobody knows, flushes that find the
 * buffer busy, work that is still in the queues at the stop, and a fork. Exits with 0 if all numbers are right.
 */
#define _GNU_SOURCE
#include <dirent.h>
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

#include "check.h"
#include "common/arena.h"
#include "fake_rocm.h"
#include "kit/kit.h"
#include "kit/vendor.h"

#define THREADS 4u
#define BUFFER_BYTES (1u << 20)
#define BATCH 200u
#define HIP_CALL 60u
#define LATE_START 10300
#define WIDE 10306

static struct {
    int (*log)(const char *, uint64_t);
    uint64_t (*logged)(void);
    void (*durations)(uint64_t, uint64_t);
    const void *(*kernel)(const char *);
    hip_error (*launch)(const void *, struct dim3, struct dim3, void **, size_t, hip_stream);
    hip_error (*stream)(hip_stream *);
    hip_error (*sync)(hip_stream);
    hip_error (*copy)(void *, const void *, size_t, int, hip_stream);
    hip_error (*malloc)(void **, size_t);
    hip_error (*free)(void *);
    hip_error (*graph)(void *, hip_stream);
} hip;

static struct {
    char path[4096];
    uint64_t version;
    int (*set)(const char *, long);
    uint64_t (*emitted)(int);
    uint64_t (*misused)(void);
    int (*active)(void);
} sdk;

static void *symbol(void *library, const char *name) {
    void *found = dlsym(library, name);
    CHECK(found != NULL);
    return found;
}

static void load(const char *folder) {
    char path[4096];
    snprintf(path, sizeof path, "%s/libamdhip64.so.7", folder);
    snprintf(sdk.path, sizeof sdk.path, "%s/librocprofiler-sdk.so.1", folder);
    void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    CHECK(library != NULL);
    *(void **)&hip.log = symbol(library, "fake_hip_log");
    *(void **)&hip.logged = symbol(library, "fake_hip_logged");
    *(void **)&hip.durations = symbol(library, "fake_hip_durations");
    *(void **)&hip.kernel = symbol(library, "fake_hip_register");
    *(void **)&hip.launch = symbol(library, "hipLaunchKernel");
    *(void **)&hip.stream = symbol(library, "hipStreamCreate");
    *(void **)&hip.sync = symbol(library, "hipStreamSynchronize");
    *(void **)&hip.copy = symbol(library, "hipMemcpyAsync");
    *(void **)&hip.malloc = symbol(library, "hipMalloc");
    *(void **)&hip.free = symbol(library, "hipFree");
    *(void **)&hip.graph = symbol(library, "hipGraphLaunch");
}

static void find_controls(void) {
    void *library = dlopen(sdk.path, RTLD_NOW | RTLD_NOLOAD);
    CHECK(library != NULL);
    *(void **)&sdk.set = symbol(library, "fake_rocprofiler_set");
    *(void **)&sdk.emitted = symbol(library, "fake_rocprofiler_emitted");
    *(void **)&sdk.misused = symbol(library, "fake_rocprofiler_misused");
    *(void **)&sdk.active = symbol(library, "fake_rocprofiler_active");
}

/* ---- a daemon: its own mapping, READY -> FREE, and what it saw ---- */

struct span {
    uint64_t start, end;
};

struct daemon {
    struct arena view;
    struct span *spans; /* of dispatches */
    uint64_t dispatches, room, copies, allocations, calls, named;
    atomic_bool ended;
    pthread_t thread;
};

static void see_dispatch(struct daemon *daemon, const struct dispatch_record *record, uint32_t bytes) {
    CHECK(bytes == (sdk.version < WIDE ? DISPATCH_BYTES : sizeof *record) && record->size == bytes);
    if (daemon->dispatches < daemon->room) {
        daemon->spans[daemon->dispatches] = (struct span){record->start, record->end};
    }
    daemon->dispatches++;
}

static void see_call(struct daemon *daemon, const uint8_t *record) {
    uint64_t words[5];
    memcpy(words, record, sizeof words);
    CHECK(words[0] > 0 && words[1] >= words[0] && words[2] > 0);
    daemon->calls++;
    daemon->named += words[4] != 0;
}

static void read_buffer(struct daemon *daemon, uint32_t index) {
    const uint8_t *buffer = arena_buffer(&daemon->view, index);
    const uint64_t valid = *arena_buffer_word(&daemon->view, index, ARENA_BUFFER_VALID_BYTES);
    struct kit_header header;
    for (uint64_t at = 0; at < valid; at += header.bytes) {
        memcpy(&header, buffer + at, sizeof header);
        CHECK(header.bytes % 8 == 0 && header.bytes > sizeof header && at + header.bytes <= valid);
        const uint8_t *record = buffer + at + sizeof header;
        switch (header.kind) {
        case BUF_KERNEL_DISPATCH:
            see_dispatch(daemon, (const void *)record, header.bytes - (uint32_t)sizeof header);
            break;
        case BUF_MEMORY_COPY: daemon->copies++; break;
        case BUF_MEMORY_ALLOCATION: daemon->allocations++; break;
        case HIP_CALL: see_call(daemon, record); break;
        default: CHECK(header.kind == KIT_KIND_TEXT); break;
        }
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
        usleep(200);
    }
    return NULL;
}

static void daemon_begin(struct daemon *daemon, int fd, uint64_t room, bool recycles) {
    struct stat status;
    memset(daemon, 0, sizeof *daemon);
    CHECK(fstat(fd, &status) == 0);
    daemon->room = room;
    daemon->spans = calloc(room + 1, sizeof *daemon->spans);
    daemon->view.base = mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(daemon->view.base != MAP_FAILED);
    memcpy(&daemon->view.fixed, daemon->view.base, sizeof daemon->view.fixed);
    atomic_store(&daemon->ended, !recycles);
    CHECK(!recycles || pthread_create(&daemon->thread, NULL, recycle, daemon) == 0);
}

static void daemon_end(struct daemon *daemon) {
    if (!atomic_exchange(&daemon->ended, true)) {
        pthread_join(daemon->thread, NULL);
    }
    sweep(daemon);
    CHECK(arena_load(&daemon->view, ARENA_CLOSED) == 1);
}

static void daemon_free(struct daemon *daemon) {
    munmap(daemon->view.base, daemon->view.fixed.total_bytes);
    free(daemon->spans);
}

/* ---- a recording ---- */

static int open_and_prepare(uint32_t buffers, uint32_t buffer_bytes, int *fd) {
    char error[512] = "";
    const int collector = kc_kit_open("rocprofiler", sdk.path, &sdk.version, error, sizeof error);
    const struct kit_config config = {.buffer_limit_bytes = (uint64_t)buffers * buffer_bytes,
                                      .buffer_bytes = buffer_bytes,
                                      .strings_bytes = 256u << 10,
                                      .prefault_bytes = buffer_bytes,
                                      .flush_period_ms = 20};
    if (collector < 0) {
        fprintf(stderr, "%s\n", error);
    }
    CHECK(collector >= 0);
    *fd = kc_kit_prepare(collector, &config, error, sizeof error);
    CHECK(*fd >= 0);
    return collector;
}

static void start(int collector) {
    const uint32_t kinds[] = {60, 61, 11, 10, 16, 12, 1, 2, 62};
    int32_t results[9];
    char error[512] = "";
    const int code = kc_kit_start(collector, kinds, 9, results, error, sizeof error);
    if (code != 0) {
        fprintf(stderr, "%s\n", error);
    }
    CHECK(code == 0);
    for (size_t i = 0; i < 9; i++) {
        CHECK(results[i] == 0);
    }
}

static struct kit_stop_result stop(int collector) {
    struct kit_stop_result result;
    CHECK(kc_kit_stop(collector, 10000, &result) == 0);
    CHECK(result.timed_out == 0 && result.flush_result == 0 && result.irregular_records == 0);
    return result;
}

/* ---- a program ---- */

struct job {
    const void *kernel;
    uint64_t launches;
    pthread_t thread;
};

static void launch(const void *kernel, hip_stream stream) {
    CHECK(hip.launch(kernel, (struct dim3){8, 4, 1}, (struct dim3){64, 2, 1}, NULL, 0, stream) == 0);
}

static void *run_job(void *argument) {
    const struct job *job = argument;
    hip_stream stream;
    CHECK(hip.stream(&stream) == 0);
    for (uint64_t i = 0; i < job->launches; i++) {
        launch(job->kernel, stream);
        if (i % BATCH == BATCH - 1) {
            CHECK(hip.sync(stream) == 0);
        }
    }
    CHECK(hip.sync(stream) == 0);
    return NULL;
}

static void run_jobs(const void *const *kernels, uint64_t launches) {
    struct job jobs[THREADS];
    for (uint32_t i = 0; i < THREADS; i++) {
        jobs[i] = (struct job){kernels[i % 2], launches / THREADS, 0};
        CHECK(pthread_create(&jobs[i].thread, NULL, run_job, &jobs[i]) == 0);
    }
    for (uint32_t i = 0; i < THREADS; i++) {
        pthread_join(jobs[i].thread, NULL);
    }
}

static int by_start(const void *left, const void *right) {
    const struct span *one = left, *other = right;
    if (one->start != other->start) {
        return one->start < other->start ? -1 : 1;
    }
    return one->end < other->end ? -1 : one->end > other->end;
}

/* Every kernel of the log is a dispatch with the same times, and the other way round. */
static void compare_with_log(const struct daemon *daemon, const char *path, uint64_t launches) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    const uint64_t entries = hip.logged();
    const struct fake_entry *log = mmap(NULL, entries * sizeof *log, PROT_READ, MAP_PRIVATE, fd, 0);
    struct span *truth = calloc(launches + 1, sizeof *truth);
    uint64_t kernels = 0, calls = 0;
    CHECK(fd >= 0 && log != MAP_FAILED);
    for (uint64_t i = 0; i < entries; i++) {
        calls += log[i].what == FAKE_KERNEL || log[i].what == FAKE_CALL;
        if (log[i].what == FAKE_KERNEL) {
            CHECK(kernels < launches);
            truth[kernels++] = (struct span){log[i].start, log[i].end};
        }
    }
    CHECK(kernels == launches && daemon->dispatches == launches);
    CHECK(daemon->calls == calls && daemon->named == launches);
    qsort(truth, kernels, sizeof *truth, by_start);
    qsort(daemon->spans, kernels, sizeof *truth, by_start);
    for (uint64_t i = 0; i < kernels; i++) {
        CHECK(truth[i].start == daemon->spans[i].start && truth[i].end == daemon->spans[i].end);
    }
    free(truth);
    munmap((void *)(uintptr_t)log, entries * sizeof *log);
    close(fd);
}

/* ---- what must hold ---- */

static void record_everything(const void *const *kernels, uint64_t launches) {
    char path[] = "/tmp/fake-hip-log-XXXXXX";
    struct daemon daemon;
    int fd;
    const int log = mkstemp(path);
    CHECK(log >= 0);
    close(log);
    const int collector = open_and_prepare(128, BUFFER_BYTES, &fd);
    daemon_begin(&daemon, fd, launches, true);
    start(collector);
    find_controls();
    CHECK(hip.log(path, launches + launches / BATCH + 4 * THREADS) == 0);
    run_jobs(kernels, launches);
    const struct kit_stop_result result = stop(collector);
    daemon_end(&daemon);
    CHECK(result.counts.dropped == 0);
    compare_with_log(&daemon, path, launches);
    printf("%llu launches: none lost, times equal, collector's thread %.3f s, %u flushes\n",
           (unsigned long long)launches, (double)result.cpu_ns / 1e9, result.flushes);
    CHECK(kc_kit_close(collector) == 0);
    daemon_free(&daemon);
    unlink(path);
}

static long resident_kib(void) {
    long size = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "re");
    CHECK(file != NULL && fscanf(file, "%ld %ld", &size, &resident) == 2);
    fclose(file);
    return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

static int descriptors(void) {
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (readdir(folder) != NULL) {
        count++;
    }
    closedir(folder);
    return count;
}

static void one_cycle(const void *kernel) {
    struct daemon daemon;
    int fd;
    const int collector = open_and_prepare(4, BUFFER_BYTES, &fd);
    daemon_begin(&daemon, fd, 0, false);
    start(collector);
    for (int i = 0; i < 20; i++) {
        launch(kernel, NULL);
    }
    CHECK(hip.sync(NULL) == 0);
    (void)stop(collector);
    daemon_end(&daemon);
    CHECK(daemon.dispatches == 20 && daemon.calls == 21 && daemon.named == 20);
    CHECK(kc_kit_close(collector) == 0);
    CHECK(sdk.active() == 1); /* the names of kernels */
    daemon_free(&daemon);
}

static void repeat(const void *kernel, int cycles) {
    long first = 0;
    const int open_before = descriptors();
    for (int i = 0; i < cycles; i++) {
        one_cycle(kernel);
        first = i == cycles / 4 ? resident_kib() : first;
    }
    const long last = resident_kib();
    printf("%d cycles: resident memory %ld -> %ld KiB, descriptors %d -> %d\n", cycles, first, last, open_before,
           descriptors());
    CHECK(descriptors() == open_before);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    CHECK(cycles < 20 || last - first < 1024);
#endif
}

static void at_the_limit(const void *kernel) {
    struct daemon daemon;
    int fd;
    const int collector = open_and_prepare(2, 4096, &fd);
    daemon_begin(&daemon, fd, 0, false);
    start(collector);
    const uint64_t before = sdk.emitted(BUF_KERNEL_DISPATCH);
    for (int i = 0; i < 500; i++) {
        launch(kernel, NULL);
    }
    CHECK(hip.sync(NULL) == 0);
    const struct kit_stop_result result = stop(collector);
    daemon_end(&daemon);
    CHECK(sdk.emitted(BUF_KERNEL_DISPATCH) - before == 500);
    CHECK(result.counts.dropped > 0 && daemon.dispatches + daemon.calls + result.counts.dropped == 1001);
    CHECK(kc_kit_close(collector) == 0);
    daemon_free(&daemon);
}

static void strange_records(const void *kernel) {
    struct daemon daemon;
    char text[512] = "";
    int fd;
    const int collector = open_and_prepare(4, BUFFER_BYTES, &fd);
    daemon_begin(&daemon, fd, 0, false);
    CHECK(sdk.set("extra_dispatch_bytes", 24) == 0);
    start(collector);
    launch(kernel, NULL);
    CHECK(hip.sync(NULL) == 0);
    (void)stop(collector);
    daemon_end(&daemon);
    CHECK(sdk.set("extra_dispatch_bytes", 0) == 0);
    CHECK(daemon.dispatches == 0 && daemon.calls == 2);
    CHECK(kc_kit_problem(collector, text, sizeof text) == 0 && strstr(text, "1 records were left out") == text);
    CHECK(kc_kit_close(collector) == 0);
    daemon_free(&daemon);
}

static void stopped_with_full_queues(const void *kernel) {
    struct daemon daemon;
    int fd;
    const int collector = open_and_prepare(4, BUFFER_BYTES, &fd);
    daemon_begin(&daemon, fd, 0, false);
    CHECK(sdk.set("busy_flushes", 3) == 0);
    start(collector);
    hip.durations(30000000, 1000); /* 30 ms each */
    for (int i = 0; i < 4; i++) {
        launch(kernel, NULL);
    }
    (void)stop(collector);
    hip.durations(1000, 1000);
    daemon_end(&daemon);
    CHECK(daemon.dispatches == 4 && daemon.calls == 4);
    CHECK(kc_kit_close(collector) == 0);
    daemon_free(&daemon);
    CHECK(hip.sync(NULL) == 0);
}

static void other_records(const void *kernel) {
    struct daemon daemon;
    int fd, status;
    void *memory;
    const int collector = open_and_prepare(4, BUFFER_BYTES, &fd);
    daemon_begin(&daemon, fd, 0, false);
    start(collector);
    CHECK(hip.malloc(&memory, 4096) == 0 && hip.copy(memory, &fd, 4, 1, NULL) == 0 && hip.free(memory) == 0);
    CHECK(hip.graph((void *)(uintptr_t)kernel, NULL) == 0 && hip.sync(NULL) == 0);
    const pid_t child = fork();
    if (child == 0) { /* HIP does not work there, but a program may still call it: nothing of ours may be touched */
        launch(kernel, NULL);
        struct kit_stop_result result;
        _exit(kc_kit_stop(collector, 10, &result) == KC_FORKED && sdk.misused() == 0 ? 0 : 1);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    (void)stop(collector);
    daemon_end(&daemon);
    CHECK(daemon.dispatches == 3 && daemon.copies == 1 && daemon.allocations == 2 && daemon.calls == 5);
    CHECK(daemon.named == 0);
    CHECK(kc_kit_close(collector) == 0);
    daemon_free(&daemon);
}

int main(int argc, char **argv) {
    const uint64_t launches = argc > 2 ? strtoull(argv[2], NULL, 10) : 8000;
    const int cycles = argc > 3 ? atoi(argv[3]) : 10;
    const char *settings = getenv("KINETO_FAKE_ROCPROFILER");
    const char *version = settings == NULL ? NULL : strstr(settings, "version=");
    CHECK(argc > 1);
    load(argv[1]);
    const void *kernels[] = {hip.kernel("_Z4axpyPfS_f"), hip.kernel("_Z3sumPKfPfi")};
    if (version == NULL || atoi(version + 8) >= LATE_START) {
        launch(kernels[0], NULL); /* before we come */
    }
    record_everything(kernels, launches);
    repeat(kernels[1], cycles);
    at_the_limit(kernels[0]);
    strange_records(kernels[0]);
    stopped_with_full_queues(kernels[1]);
    other_records(kernels[1]);
    CHECK(sdk.misused() == 0);
    return 0;
}
