/* A made-up vendor's tracing library and its plug-in for the collector kit, in one.
 *
 * Built as it is, it lends: it asks for a buffer for each stream, fills it on the launching thread and returns it when it
 * is full, or in a flush; with by_text each record has an address of its own for its name, as PTI 0.17 has them. Built
 * with FAKE_PUSHES, it keeps every second record to itself until the next flush, as a library with buffers of its own
 * does, and hands the others over at once; its times are CLOCK_BOOTTIME.
 */
#define _GNU_SOURCE
#include "fake_vendor.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "kit/vendor.h"

#define STREAMS 64u
#define EXPORT __attribute__((visibility("default")))
#define NS_PER_S 1000000000ull
#define PENDING_MOST 4096u
#define NAMES_MOST 256u
#define SHARED_BYTES (1u << 20)

static struct {
    pthread_mutex_t lock;
    long refuse_kind, start_fails, open_fails, when_full, by_text, hold_a_buffer, unreadable_names, one_wide_kernel;
    long flush_delay_ms, problem, version, bad_name, next_dropped;
} plan = {.lock = PTHREAD_MUTEX_INITIALIZER, .when_full = KIT_FULL_NEVER_DECLINES, .version = 7};

static struct {
    const char *name;
    long *value;
} const KEYS[] = {
    {"refuse_kind", &plan.refuse_kind},
    {"start_fails", &plan.start_fails},
    {"open_fails", &plan.open_fails},
    {"when_full", &plan.when_full},
    {"by_text", &plan.by_text},
    {"hold_a_buffer", &plan.hold_a_buffer},
    {"unreadable_names", &plan.unreadable_names},
    {"one_wide_kernel", &plan.one_wide_kernel},
    {"flush_delay_ms", &plan.flush_delay_ms},
    {"problem", &plan.problem},
    {"version", &plan.version},
    {"bad_name", &plan.bad_name},
    {"next_dropped", &plan.next_dropped},
};

static struct {
    const struct kit_host *host;
    uint32_t kinds; /* bits: wanted now */
    pid_t process;
    uint64_t written, refused, misused, releases;
    const char *names[NAMES_MOST];
    uint32_t name_count;
    char *texts; /* a list of the names that have addresses of their own */
} fake;

static struct stream {
    pthread_mutex_t lock;
    uint8_t *buffer;
    size_t size, used;
    uint64_t launches;
    struct fake_kernel pending[PENDING_MOST];
    uint32_t pending_count;
} streams[STREAMS];

static void make_locks(void) {
    pthread_mutex_init(&plan.lock, NULL);
    for (uint32_t i = 0; i < STREAMS; i++) {
        pthread_mutex_init(&streams[i].lock, NULL);
    }
}

/* A child may launch, too, that is forked while another thread of its parent flushes. */
__attribute__((constructor)) static void prepare_locks(void) {
    make_locks();
    pthread_atfork(NULL, NULL, make_locks);
}

static uint64_t now(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (uint64_t)time.tv_sec * NS_PER_S + (uint64_t)time.tv_nsec;
}

static long planned(const long *value) { return __atomic_load_n(value, __ATOMIC_SEQ_CST); }

static void count(uint64_t *counter, uint64_t amount) { __atomic_fetch_add(counter, amount, __ATOMIC_SEQ_CST); }

static uint64_t counted(const uint64_t *counter) { return __atomic_load_n(counter, __ATOMIC_SEQ_CST); }

EXPORT int fake_vendor_set(const char *key, long value) {
    for (size_t i = 0; i < sizeof KEYS / sizeof *KEYS; i++) {
        if (strcmp(KEYS[i].name, key) == 0) {
            __atomic_store_n(KEYS[i].value, value, __ATOMIC_SEQ_CST);
            return 0;
        }
    }
    return -1;
}

EXPORT uint64_t fake_vendor_written(void) { return counted(&fake.written); }
EXPORT uint64_t fake_vendor_refused(void) { return counted(&fake.refused); }
EXPORT uint64_t fake_vendor_misused(void) { return counted(&fake.misused); }
EXPORT uint64_t fake_vendor_releases(void) { return counted(&fake.releases); }

/* Every call of the library must be made in the process that opened it. */
static void expect(bool right) { count(&fake.misused, !right || fake.process != getpid()); }

static bool wants(uint32_t kind) { return (__atomic_load_n(&fake.kinds, __ATOMIC_SEQ_CST) >> kind & 1) != 0; }

/* ---- names ---- */

/* One text for each name, at one address for the life of the process; its number, from 1. */
static uint32_t number_of(const char *name) {
    pthread_mutex_lock(&plan.lock);
    uint32_t i = 0;
    while (i < fake.name_count && strcmp(fake.names[i], name) != 0) {
        i++;
    }
    if (i == fake.name_count && i < NAMES_MOST) {
        fake.names[fake.name_count++] = strdup(name);
    }
    pthread_mutex_unlock(&plan.lock);
    return i + 1;
}

#ifndef FAKE_PUSHES

/* A text of its own, which stays. */
static uint64_t fresh(const char *name) {
    const size_t bytes = sizeof(char *) + strlen(name) + 1;
    char *made = malloc(bytes);
    pthread_mutex_lock(&plan.lock);
    memcpy(made, &fake.texts, sizeof(char *));
    strcpy(made + sizeof(char *), name);
    fake.texts = made;
    pthread_mutex_unlock(&plan.lock);
    return (uint64_t)(uintptr_t)(made + sizeof(char *));
}

static uint64_t address_of(const char *name) {
    if (planned(&plan.unreadable_names)) {
        return 8; /* nothing is mapped there */
    }
    return planned(&plan.by_text) ? fresh(name) : (uint64_t)(uintptr_t)fake.names[number_of(name) - 1];
}

/* ---- lent buffers ---- */

static void give_back(struct stream *stream) {
    if (stream->buffer != NULL) {
        fake.host->buffer_completed(stream->buffer, stream->size, stream->used);
        stream->buffer = NULL;
    }
}

/* Buffers of more than the arena's size lie outside it, and may be lent to several streams at once. */
__attribute__((no_sanitize("thread"))) static void copy_into_shared(uint8_t *to, const uint8_t *from, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        ((volatile uint8_t *)to)[i] = from[i];
    }
}

static void write_record(struct stream *stream, const void *record, size_t bytes) {
    if (stream->buffer != NULL && stream->used + bytes > stream->size) {
        give_back(stream);
    }
    if (stream->buffer == NULL) {
        fake.host->buffer_requested(&stream->buffer, &stream->size);
        stream->used = 0;
    }
    if (stream->buffer == NULL) {
        count(&fake.refused, 1);
        __atomic_fetch_add(&plan.next_dropped, 1, __ATOMIC_SEQ_CST);
        return;
    }
    if (stream->size >= SHARED_BYTES) {
        copy_into_shared(stream->buffer + stream->used, record, bytes);
    } else {
        memcpy(stream->buffer + stream->used, record, bytes);
    }
    stream->used += bytes;
}

static void record_launch(struct stream *stream, const struct fake_kernel *kernel, const char *name) {
    uint8_t wide[sizeof *kernel + 8] = {0};
    struct fake_kernel whole = *kernel;
    whole.name = address_of(name);
    memcpy(wide, &whole, sizeof whole);
    const bool is_wide = __atomic_exchange_n(&plan.one_wide_kernel, 0, __ATOMIC_SEQ_CST) != 0;
    write_record(stream, wide, is_wide ? sizeof wide : sizeof whole);
}

static void record_call(struct stream *stream, const struct fake_call *call) {
    write_record(stream, call, sizeof *call);
}

static void hand_over(struct stream *stream) { give_back(stream); }

/* Kernels may be of two sizes: a wide one is marked by what is not a kind behind it. */
static int32_t next_record(uint8_t *buffer, size_t used, void **record) {
    uint8_t *at = *record;
    uint32_t kind;
    if (at == NULL) {
        at = buffer;
    } else {
        memcpy(&kind, at, sizeof kind);
        at += kind == FAKE_KERNEL ? sizeof(struct fake_kernel) : sizeof(struct fake_call);
        memcpy(&kind, at, at < buffer + used ? sizeof kind : 0);
        at += at < buffer + used && kind == 0 ? 8 : 0;
    }
    *record = at;
    return at < buffer + used ? 0 : 1;
}

#else

/* ---- pushed records ---- */

static void record_launch(struct stream *stream, const struct fake_kernel *kernel, const char *name) {
    struct fake_kernel whole = *kernel;
    whole.name = number_of(name);
    (void)fake.host->add_text(FAKE_NAME_SPACE, whole.name, name, (uint32_t)strlen(name));
    if (kernel->number % 2 == 0) {
        (void)fake.host->push(FAKE_KERNEL, &whole, sizeof whole);
    } else if (stream->pending_count < PENDING_MOST) {
        stream->pending[stream->pending_count++] = whole;
    } else {
        fake.host->dropped(1);
    }
}

static void record_call(struct stream *stream, const struct fake_call *call) {
    (void)stream;
    (void)fake.host->push(FAKE_CALL, call, sizeof *call - 3); /* needs padding */
}

static void hand_over(struct stream *stream) {
    for (uint32_t i = 0; i < stream->pending_count; i++) {
        (void)fake.host->push(FAKE_KERNEL, &stream->pending[i], sizeof stream->pending[i]);
    }
    stream->pending_count = 0;
}

static uint64_t read_clock(void) { return now(CLOCK_BOOTTIME); }

#endif

/* ---- what the program does ---- */

EXPORT void fake_vendor_launch(const char *name, uint32_t launches, uint32_t number) {
    struct stream *stream = &streams[number];
    for (uint32_t i = 0; i < launches; i++) {
        pthread_mutex_lock(&stream->lock);
        const uint64_t start = now(CLOCK_REALTIME);
        if (wants(FAKE_CALL)) {
            const struct fake_call call = {FAKE_CALL, number, start, start + 10, stream->launches, 0};
            count(&fake.written, 1);
            record_call(stream, &call);
        }
        if (wants(FAKE_KERNEL)) {
            const struct fake_kernel kernel = {FAKE_KERNEL, number, 0, start + 5, start + 20, stream->launches, {0}};
            count(&fake.written, 1);
            record_launch(stream, &kernel, name);
        }
        stream->launches++;
        pthread_mutex_unlock(&stream->lock);
    }
}

/* ---- the vendor ---- */

static int open_library(const struct kit_host *host, const char *path, struct kit_library *library, char *error,
                        size_t error_bytes) {
    fake.process = getpid();
    expect(host != NULL && host->abi == KIT_ABI && host->size == sizeof *host && fake.kinds == 0);
    if (planned(&plan.open_fails)) {
        snprintf(error, error_bytes, "%s is not a library of the fake vendor", path);
        return -1;
    }
    fake.host = host;
    library->version = (uint64_t)planned(&plan.version);
    library->when_full = (uint32_t)planned(&plan.when_full);
    library->name_count = 1;
    library->names[0] = (struct kit_name){.kind = FAKE_KERNEL,
                                          .offset = planned(&plan.bad_name) ? 0 : offsetof(struct fake_kernel, name),
                                          .space = FAKE_NAME_SPACE,
                                          .key = planned(&plan.by_text) ? KIT_BY_TEXT : KIT_BY_POINTER};
    return 0;
}

static int start(const uint32_t *kinds, uint32_t kind_count, int32_t *results, char *error, size_t error_bytes) {
    uint32_t wanted = 0;
    expect(fake.kinds == 0);
    for (uint32_t i = 0; i < kind_count; i++) {
        results[i] = planned(&plan.refuse_kind) == (long)kinds[i] || planned(&plan.start_fails) ? FAKE_REFUSED : 0;
        wanted |= results[i] == 0 ? 1u << kinds[i] : 0;
    }
    __atomic_store_n(&fake.kinds, wanted, __ATOMIC_SEQ_CST);
    if (wanted == 0) {
        snprintf(error, error_bytes, "the fake vendor records none of these");
        return KIT_VENDOR_FAILED;
    }
    return 0;
}

static void stop(void) {
    expect(fake.kinds != 0);
    __atomic_store_n(&fake.kinds, 0, __ATOMIC_SEQ_CST);
}

static int32_t flush(bool forced) {
    expect(true);
    for (long passed_ms = 0; forced && passed_ms < planned(&plan.flush_delay_ms); passed_ms++) { /* until it is 0 */
        const struct timespec delay = {.tv_nsec = 1000000};
        nanosleep(&delay, NULL);
    }
    for (uint32_t i = planned(&plan.hold_a_buffer) != 0; i < STREAMS; i++) {
        pthread_mutex_lock(&streams[i].lock);
        hand_over(&streams[i]);
        pthread_mutex_unlock(&streams[i].lock);
    }
    return 0;
}

static uint64_t take_dropped(void) { return (uint64_t)__atomic_exchange_n(&plan.next_dropped, 0, __ATOMIC_SEQ_CST); }

static void release(void) { count(&fake.releases, 1); }

static int64_t describe(char *text, size_t text_bytes) {
    return snprintf(text, text_bytes, "{\"fake_mode\": \"%s\"}", planned(&plan.by_text) ? "by text" : "by pointer");
}

static int64_t problem(char *text, size_t text_bytes) {
    return planned(&plan.problem) ? snprintf(text, text_bytes, "the fake device was switched off") : 0;
}

static const char *result_text(int32_t result) { return result == FAKE_REFUSED ? "FAKE_REFUSED" : NULL; }

EXPORT const struct kit_vendor *kineto_vendor(uint32_t kit_abi);

const struct kit_vendor *kineto_vendor(uint32_t kit_abi) {
    static const struct kit_vendor VENDOR = {
        .abi = KIT_ABI,
        .size = sizeof(struct kit_vendor),
#ifdef FAKE_PUSHES
        .name = "fake pushing vendor",
        .read_clock = read_clock,
#else
        .name = "fake lending vendor",
        .next_record = next_record,
#endif
        .open = open_library,
        .start = start,
        .stop = stop,
        .flush = flush,
        .take_dropped = take_dropped,
        .release = release,
        .describe = describe,
        .problem = problem,
        .result_text = result_text,
    };
    return kit_abi == KIT_ABI ? &VENDOR : NULL;
}
