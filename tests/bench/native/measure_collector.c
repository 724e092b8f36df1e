/* Prints what the collector costs as one JSON object; see tests/bench/collector.py.
 *
 *   measure_collector LIBCUPTI
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/arena.h"
#include "cupti/cupti_api.h"
#include "cupti/collector.h"
#include "cupti/cupti_vendor.h"
#include "common/wake.h"
#include "kit/parse_buffers.h"

#define BUFFER_BYTES (4u << 20)
#define STRINGS_BYTES (8u << 20)
#define LAUNCHES 500000u
#define ROUNDS 20
#define CALLBACKS 200000
#define TEXT_RECORDS 20000u
#define TEXT_BYTES 168u
#define PUSHES 100000u

static void (*launch_many)(const char *name, uint32_t count, uint64_t duration_ns, uint32_t stream);

static void fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static struct arena make_arena(uint32_t buffers) {
    struct arena arena;
    const char *step;
    if (arena_create(&arena, buffers, BUFFER_BYTES, STRINGS_BYTES, &step) != 0) {
        fail(step);
    }
    return arena;
}

static void measure_populate(void) {
    struct arena arena = make_arena(8);
    const int64_t begin = clock_ns(CLOCK_MONOTONIC);
    arena_populate(&arena, 8ull * BUFFER_BYTES);
    printf("\"prefault_32_mib_ms\": %.1f, ", (double)(clock_ns(CLOCK_MONOTONIC) - begin) / 1e6);
    arena_destroy(&arena);
}

/* One buffer requested and returned, with `busy` buffers before it that are not FREE. */
static void measure_callbacks(const char *name, uint32_t busy) {
    struct arena arena = make_arena(busy + 1);
    struct wake work = {0};
    uint8_t *buffer;
    size_t size, most;
    for (uint32_t i = 0; i < busy; i++) {
        arena_set_state(&arena, i, ARENA_READY);
    }
    pool_open(&cupti_collector.pool, &arena, &work, KIT_FULL_DECLINES);
    int64_t requested = 0, completed = 0;
    for (int i = 0; i < CALLBACKS; i++) {
        const int64_t begin = clock_ns(CLOCK_MONOTONIC);
        cupti_buffer_requested(&buffer, &size, &most);
        const int64_t middle = clock_ns(CLOCK_MONOTONIC);
        cupti_buffer_completed(NULL, 0, buffer, size, 0);
        requested += middle - begin;
        completed += clock_ns(CLOCK_MONOTONIC) - middle;
        arena_set_state(&arena, busy, ARENA_FREE);
    }
    pool_close(&cupti_collector.pool);
    printf("\"%s_requested_ns\": %.0f, \"%s_completed_ns\": %.0f, ", name, (double)requested / CALLBACKS, name,
           (double)completed / CALLBACKS);
    arena_destroy(&arena);
}

/* One full buffer of launches and kernels, walked by the learned sizes and by cuptiActivityGetNextRecord. */
static void measure_walk(const struct cupti_api *api) {
    struct arena arena = make_arena(1);
    struct wake work = {0};
    struct walker walker;
    const struct kit_library library = {.name_count = 1,
                                        .names = {{.kind = CUPTI_KIND_CONCURRENT_KERNEL, .offset = 104}}};
    cupti.api = *api;
    walker_init(&walker, cupti_collector.vendor, &library, &arena);
    pool_open(&cupti_collector.pool, &arena, &work, KIT_FULL_DECLINES);
    api->register_callbacks(cupti_buffer_requested, cupti_buffer_completed);
    api->enable(CUPTI_KIND_CONCURRENT_KERNEL);
    api->enable(CUPTI_KIND_RUNTIME);
    launch_many("void gemm<float>(float*)", 16000, 1, 0);
    api->disable(CUPTI_KIND_CONCURRENT_KERNEL);
    api->disable(CUPTI_KIND_RUNTIME);
    api->flush_all(CUPTI_FLUSH_FORCED);
    walker_publish(&walker, 0); /* learns */
    const uint64_t records = *arena_buffer_word(&arena, 0, ARENA_BUFFER_RECORDS);
    const uint64_t valid = *arena_buffer_word(&arena, 0, ARENA_BUFFER_VALID_BYTES);
    int64_t begin = clock_ns(CLOCK_MONOTONIC);
    for (int i = 0; i < ROUNDS; i++) {
        walker_publish(&walker, 0);
    }
    int64_t end = clock_ns(CLOCK_MONOTONIC);
    printf("\"walk_ns_per_record\": %.2f, ", (double)(end - begin) / ROUNDS / (double)records);
    begin = clock_ns(CLOCK_MONOTONIC);
    for (int i = 0; i < ROUNDS; i++) {
        walker_drop(&walker, arena_buffer(&arena, 0), valid);
    }
    end = clock_ns(CLOCK_MONOTONIC);
    printf("\"next_record_ns_per_record\": %.2f, ", (double)(end - begin) / ROUNDS / (double)records);
    pool_close(&cupti_collector.pool);
    walker_free(&walker);
    arena_destroy(&arena);
}

/* Names known by their text: one buffer of records whose names have an address each, among eight texts. */
static void measure_texts(void) {
    static char texts[TEXT_RECORDS][TEXT_BYTES];
    struct arena arena = make_arena(1);
    struct walker walker;
    const struct kit_library library = {.name_count = 1, .names = {{.kind = 1, .offset = 8, .key = KIT_BY_TEXT}}};
    walker_init(&walker, cupti_collector.vendor, &library, &arena);
    walker.sizes[1] = TEXT_BYTES;
    *arena_buffer_word(&arena, 0, ARENA_BUFFER_VALID_BYTES) = TEXT_RECORDS * (uint64_t)TEXT_BYTES;
    int64_t took = 0;
    for (int round = 0; round < ROUNDS; round++) {
        for (uint32_t i = 0; i < TEXT_RECORDS; i++) {
            const uint64_t record[2] = {1, (uint64_t)(uintptr_t)texts[i]};
            snprintf(texts[i], TEXT_BYTES, "void gemm_of_some_tiles<float, %u>(float*)", i % 8);
            memcpy(arena_buffer(&arena, 0) + (size_t)i * TEXT_BYTES, record, sizeof record);
        }
        const int64_t begin = clock_ns(CLOCK_MONOTONIC);
        walker_publish(&walker, 0);
        took += clock_ns(CLOCK_MONOTONIC) - begin;
    }
    if (walker.names.used != 8 || walker.names_lost != 0) {
        fail("texts were lost");
    }
    printf("\"text_ns_per_record\": %.1f, ", (double)took / ROUNDS / TEXT_RECORDS);
    walker_free(&walker);
    arena_destroy(&arena);
}

/* Records pushed by one thread, of the size of rocprofiler's kernel records. */
static void measure_push(void) {
    static const struct kit_vendor VENDOR = {.name = "pushes"};
    static struct kit_collector collector = {.vendor = &VENDOR};
    static const uint8_t RECORD[184];
    struct arena arena = make_arena(8);
    struct wake work = {0};
    arena_populate(&arena, 8ull * BUFFER_BYTES);
    if (!stream_init(&collector.stream, 8, &work)) {
        fail("out of memory");
    }
    pool_open(&collector.pool, &arena, &work, KIT_FULL_DECLINES);
    const int64_t begin = clock_ns(CLOCK_MONOTONIC);
    for (uint32_t i = 0; i < PUSHES; i++) {
        if (!collector_push(&collector, 11, RECORD, sizeof RECORD)) {
            fail("a record found no room");
        }
    }
    printf("\"push_ns_per_record\": %.1f, ", (double)(clock_ns(CLOCK_MONOTONIC) - begin) / PUSHES);
    pool_close(&collector.pool);
    stream_free(&collector.stream);
    arena_destroy(&arena);
}

/* A whole capture: CPU time of the collector's thread a record, all of it. */
static void measure_capture(const char *path, const char *name, uint64_t prefault) {
    char error[256] = "";
    uint32_t version;
    int32_t result;
    static const char PATTERNS[] = "cudaLaunch*\0";
    const uint32_t kinds[] = {10};
    struct kc_stop_result stopped;
    const struct kc_config config = {.buffer_limit_bytes = 512ull << 20,
                                     .buffer_bytes = BUFFER_BYTES,
                                     .strings_bytes = STRINGS_BYTES,
                                     .prefault_bytes = prefault,
                                     .flush_period_ms = 500,
                                     .kernel_name_offset = 104,
                                     .may_decline = 1};
    int64_t at[6];
    at[0] = clock_ns(CLOCK_MONOTONIC);
    if (kc_open(path, &version, error, sizeof error) != 0 || kc_prepare(&config, error, sizeof error) < 0) {
        fail(error);
    }
    if (kc_keep_calls(2, PATTERNS, sizeof PATTERNS) != 0 || kc_subscribe(&result) != 0) {
        fail("no calls");
    }
    at[1] = clock_ns(CLOCK_MONOTONIC);
    if (kc_start(kinds, 1, &result, error, sizeof error) != 0 || kc_record_calls(error, sizeof error) != 0) {
        fail(error);
    }
    at[2] = clock_ns(CLOCK_MONOTONIC);
    launch_many("void gemm<float>(float*)", LAUNCHES, 1, 0);
    at[3] = clock_ns(CLOCK_MONOTONIC);
    kc_stop(10000, &stopped);
    at[4] = clock_ns(CLOCK_MONOTONIC);
    kc_close();
    at[5] = clock_ns(CLOCK_MONOTONIC);
    printf("\"%s\": {\"records\": %lu, \"thread_ns_per_record\": %.1f, \"prepare_ms\": %.1f, \"start_ms\": %.2f, "
           "\"run_ms\": %.0f, \"stop_ms\": %.2f, \"close_ms\": %.1f}",
           name, (unsigned long)stopped.counts.records, (double)stopped.cpu_ns / (double)stopped.counts.records,
           (double)(at[1] - at[0]) / 1e6, (double)(at[2] - at[1]) / 1e6, (double)(at[3] - at[2]) / 1e6,
           (double)(at[4] - at[3]) / 1e6, (double)(at[5] - at[4]) / 1e6);
}

int main(int count, char **arguments) {
    struct cupti_api api;
    char error[256];
    if (count != 2 || cupti_api_open(&api, arguments[1], error, sizeof error) != 0) {
        fail("usage: measure_collector LIBCUPTI");
    }
    void *fake = dlopen(arguments[1], RTLD_NOW);
    *(void **)&launch_many = dlsym(fake, "fake_launch_many");
    printf("{");
    measure_populate();
    measure_callbacks("first_free", 0);
    measure_callbacks("after_255_busy", 255);
    measure_walk(&api);
    measure_texts();
    measure_push();
    measure_capture(arguments[1], "capture", 32u << 20);
    printf(", ");
    measure_capture(arguments[1], "capture_prefaulted", 512u << 20);
    printf("}\n");
    return 0;
}
