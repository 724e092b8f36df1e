/* Drives the stack sampler over an interpreter that is made up here, for the sanitizers.
 *
 *   drive_stacks
 *
 * Threads that call and return all the time while they are sampled; thread states that are freed and unmapped; chains
 * that lead to memory that is not there, or round in circles; names that are none; a table that is full; forks; recordings one after another;
 * an exit in the middle. Exits with 0 if all numbers are right.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/arena.h"
#include "check.h"
#include "python/stack_sampler.h"

#define THREADS 4u
#define FRAMES 12u
#define LIMIT_MS 5000u

struct fake_text {
    uint64_t references, type, length, hash;
    uint32_t state, padding;
    char characters[24];
};

struct fake_bytes {
    uint64_t references, type, size, hash;
    char value[16];
};

struct fake_tuple {
    uint64_t references, type, size;
    const struct fake_text *items[3];
};

struct fake_code {
    uint64_t references, type, size;
    const struct fake_text *filename, *name;
    const struct fake_bytes *lines;
    const struct fake_tuple *names, *variables;
    uint32_t first_line, padding;
    uint16_t bytecode[64];
};

struct fake_frame {
    const struct fake_code *code;
    struct fake_frame *previous;
    const uint16_t *instruction;
    uint8_t owner, padding[7];
};

struct fake_thread {
    struct fake_thread *next;
    struct fake_interpreter *interpreter;
    struct fake_frame *frame;
    uint64_t id, native_id;
};

struct fake_gil {
    struct fake_thread *holder;
    int32_t locked, padding;
    char lock[160];
};

struct fake_interpreter {
    struct fake_interpreter *next;
    struct fake_thread *threads;
    struct fake_gil *gil;
    int32_t collecting;
};

static struct {
    struct fake_interpreter *interpreters;
} runtime;

static const char code_type;
static struct fake_text names[3];
static struct fake_text file;
static struct fake_bytes lines;
static struct fake_tuple called_names = {.size = 3, .items = {&names[0], &names[1], &names[2]}};
static struct fake_tuple broken_names = {.size = (uint64_t)1 << 40, .items = {&names[0], (void *)0x1000}};
static struct fake_code codes[3];
static struct fake_gil gil;
static struct fake_interpreter interpreters[2];
static atomic_bool go_on;

static const struct kc_sampler_layout layout = {
    .frames = KC_FRAMES_BY_THREAD,
    .gil = KC_GIL_BY_POINTER,
    .runtime_interpreters = 0,
    .interpreter_next = offsetof(struct fake_interpreter, next),
    .interpreter_threads = offsetof(struct fake_interpreter, threads),
    .thread_next = offsetof(struct fake_thread, next),
    .thread_interpreter = offsetof(struct fake_thread, interpreter),
    .thread_frame = offsetof(struct fake_thread, frame),
    .thread_id = offsetof(struct fake_thread, id),
    .thread_native_id = offsetof(struct fake_thread, native_id),
    .frame_code = offsetof(struct fake_frame, code),
    .frame_previous = offsetof(struct fake_frame, previous),
    .frame_instruction = offsetof(struct fake_frame, instruction),
    .frame_owner = offsetof(struct fake_frame, owner),
    .least_shim_owner = 3,
    .object_type = offsetof(struct fake_code, type),
    .object_size = offsetof(struct fake_code, size),
    .code_filename = offsetof(struct fake_code, filename),
    .code_name = offsetof(struct fake_code, name),
    .code_first_line = offsetof(struct fake_code, first_line),
    .code_lines = offsetof(struct fake_code, lines),
    .code_bytecode = offsetof(struct fake_code, bytecode),
    .code_names = offsetof(struct fake_code, names),
    .code_variables = offsetof(struct fake_code, variables),
    .tuple_items = offsetof(struct fake_tuple, items),
    .bytes_value = offsetof(struct fake_bytes, value),
    .text_length = offsetof(struct fake_text, length),
    .text_state = offsetof(struct fake_text, state),
    .text_kind_shift = 2,
    .text_ascii = offsetof(struct fake_text, characters),
    .text_compact = offsetof(struct fake_text, characters),
    .gil_offset = offsetof(struct fake_interpreter, gil),
    .gil_holder = offsetof(struct fake_gil, holder),
    .gil_locked = offsetof(struct fake_gil, locked),
    .interpreter_collecting = offsetof(struct fake_interpreter, collecting),
    .line_table_kind = 11,
};

static void set_text(struct fake_text *text, const char *characters) {
    text->length = strlen(characters);
    text->hash = 7 * text->length + (uint64_t)characters[0];
    text->state = 1u << 2 | 1u << 5 | 1u << 6; /* of one byte each, compact, ASCII */
    memcpy(text->characters, characters, text->length);
}

static void make_interpreter(void) {
    static const char *const called[3] = {"outer", "middle", "inner"};
    set_text(&file, "/fake.py");
    lines.size = 4;
    for (uint32_t i = 0; i < 3; i++) {
        set_text(&names[i], called[i]);
        codes[i] = (struct fake_code){.references = 1,
                                      .type = (uint64_t)(uintptr_t)&code_type,
                                      .size = 64,
                                      .filename = &file,
                                      .name = &names[i],
                                      .lines = &lines,
                                      .names = &called_names,
                                      .variables = i == 2 ? &broken_names : &called_names,
                                      .first_line = i + 1};
    }
    interpreters[0] = (struct fake_interpreter){.next = &interpreters[1], .gil = &gil};
    interpreters[1] = (struct fake_interpreter){.gil = &gil};
    runtime.interpreters = &interpreters[0];
}

/* Calls and returns like an interpreter, in memory that only this thread writes. */
__attribute__((no_sanitize("thread"))) static void call(struct fake_thread *thread, struct fake_frame *frames,
                                                        uint32_t depth) {
    struct fake_frame *frame = &frames[depth];
    const struct fake_code *code = &codes[depth == 0 ? 0 : 1 + depth % 2];
    frame->code = code;
    frame->previous = depth == 0 ? NULL : &frames[depth - 1];
    frame->instruction = &code->bytecode[depth];
    __atomic_store_n(&thread->frame, frame, __ATOMIC_RELEASE);
    if (depth + 1 < FRAMES) {
        call(thread, frames, depth + 1);
    }
    __atomic_store_n(&thread->frame, frame, __ATOMIC_RELEASE);
}

static void link_thread(struct fake_thread *thread, struct fake_interpreter *interpreter) {
    thread->interpreter = interpreter;
    thread->id = (uint64_t)pthread_self();
    thread->native_id = (uint64_t)syscall(SYS_gettid);
    thread->next = __atomic_load_n(&interpreter->threads, __ATOMIC_ACQUIRE);
    while (!__atomic_compare_exchange_n(&interpreter->threads, &thread->next, thread, false, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST)) {
    }
}

static void *run_calls(void *argument) {
    const size_t bytes = sizeof(struct fake_thread) + FRAMES * sizeof(struct fake_frame);
    struct fake_thread *thread = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(thread != MAP_FAILED);
    struct fake_frame *frames = (struct fake_frame *)(void *)(thread + 1);
    link_thread(thread, argument);
    while (go_on) {
        call(thread, frames, 0);
    }
    munmap(thread, bytes); /* still in the list, as if the interpreter were in the middle of taking it out */
    return NULL;
}

static int open_sampler(uint32_t hz, uint64_t strings_bytes) {
    char error[256] = "";
    struct kc_sampler_layout places = layout;
    places.runtime = (uint64_t)(uintptr_t)&runtime;
    places.code_type = (uint64_t)(uintptr_t)&code_type;
    const struct kc_sampler_config config = {.buffer_limit_bytes = 1u << 20,
                                             .buffer_bytes = 64u << 10,
                                             .strings_bytes = strings_bytes,
                                             .hz = hz,
                                             .max_load_ppm = 1000000};
    CHECK(kc_sampler_open(&places, error, sizeof error) == 0);
    const int fd = kc_sampler_prepare(&config, error, sizeof error);
    CHECK(fd >= 0);
    CHECK(kc_sampler_prepare(&config, error, sizeof error) < 0); /* one at a time */
    CHECK(kc_sampler_name((uint32_t)getpid(), "main", 4) == 0);
    CHECK(kc_sampler_start(error, sizeof error) == 0);
    return fd;
}

static void await_ticks(uint64_t ticks) {
    for (uint32_t i = 0; kc_sampler_ticks() < ticks && i < 20000; i++) {
        usleep(1000);
    }
    CHECK(kc_sampler_ticks() >= ticks);
}

static void close_sampler(struct kc_sampler_stop_result *result) {
    CHECK(kc_sampler_stop(LIMIT_MS, result) == 0);
    CHECK(result->timed_out == 0);
    CHECK(kc_sampler_close() == 0);
}

/* Samples with a stack: a sanitizer has a thread of its own, which is sampled as one without Python. After the stop. */
static uint64_t samples_with_stack(int fd) {
    struct record {
        uint64_t time;
        uint32_t tid, node, state, cpu_us;
    };
    struct arena arena = {.fd = fd};
    uint64_t count = 0;
    CHECK(pread(fd, &arena.fixed, sizeof arena.fixed, 0) == (ssize_t)sizeof arena.fixed);
    arena.base = mmap(NULL, arena.fixed.total_bytes, PROT_READ, MAP_SHARED, fd, 0);
    CHECK(arena.base != MAP_FAILED);
    for (uint32_t i = 0; i < arena.fixed.buffer_count; i++) {
        const struct record *records = (const void *)arena_buffer(&arena, i);
        const uint64_t filled = *arena_buffer_word(&arena, i, ARENA_BUFFER_RECORDS);
        for (uint64_t j = 0; arena_load_state(&arena, i) == ARENA_READY && j < filled; j++) {
            count += records[j].node != 0;
        }
    }
    CHECK(munmap(arena.base, arena.fixed.total_bytes) == 0);
    return count;
}

static void check_fork(void) {
    struct kc_sampler_stop_result result;
    char error[64];
    const pid_t pid = fork();
    if (pid == 0) {
        const struct kc_sampler_config config = {.buffer_bytes = 64u << 10};
        _exit(kc_sampler_ticks() == 0 && kc_sampler_stop(1, &result) < 0 &&
                      kc_sampler_prepare(&config, error, sizeof error) < 0
                  ? 0
                  : 1);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

static void threads_come_and_go(void) {
    struct kc_sampler_stop_result result;
    uint64_t seen = 0;
    (void)open_sampler(1000, 1u << 20);
    for (uint32_t round = 0; round < 6; round++) {
        pthread_t threads[THREADS];
        go_on = true;
        for (uint32_t i = 0; i < THREADS; i++) {
            CHECK(pthread_create(&threads[i], NULL, run_calls, &interpreters[i % 2]) == 0);
        }
        await_ticks(kc_sampler_ticks() + 15);
        check_fork();
        go_on = false;
        for (uint32_t i = 0; i < THREADS; i++) {
            CHECK(pthread_join(threads[i], NULL) == 0);
        }
        await_ticks(kc_sampler_ticks() + 2);
        interpreters[0].threads = interpreters[1].threads = NULL;
    }
    struct kc_counts counts;
    CHECK(kc_sampler_counts(&counts) == 0);
    close_sampler(&result);
    seen = result.counts.records;
    CHECK(seen > 6 * THREADS * 5);
    CHECK(result.torn_samples * 5 < seen);
    CHECK(result.unnamed_samples == 0);
}

static void nonsense_is_survived(void) {
    struct kc_sampler_stop_result result;
    struct fake_frame circle = {.code = &codes[0]};
    struct fake_frame nowhere = {.code = &codes[0], .previous = (struct fake_frame *)0x1000};
    struct fake_frame strange = {.code = (const struct fake_code *)(const void *)&names[0]};
    struct fake_frame *const innermost[] = {&circle, &nowhere, &strange, (struct fake_frame *)~(uintptr_t)7};
    circle.previous = &circle;
    for (uint32_t i = 0; i < 4; i++) {
        struct fake_thread thread = {.frame = innermost[i]};
        interpreters[0].threads = NULL;
        link_thread(&thread, &interpreters[0]);
        (void)open_sampler(1000, 1u << 20);
        await_ticks(5);
        close_sampler(&result);
        CHECK(i == 0 ? result.truncated_stacks > 0 : result.torn_samples > 0);
        CHECK(result.counts.dropped == 0); /* no room was missing */
        interpreters[0].threads = (struct fake_thread *)0x10;
        (void)open_sampler(1000, 1u << 20);
        await_ticks(3);
        close_sampler(&result);
    }
    interpreters[0].threads = NULL;
}

/* Its memory still holds the function, but what that points to may be another's by now. written: what allocators leave
 * in the first word of freed memory: nothing, a pointer, or the end of a list that is protected by the address. */
static void a_freed_function_is_not_believed(void) {
    static struct fake_code next_free;
    const uint64_t written[] = {0, (uint64_t)(uintptr_t)&next_free, (uint64_t)(uintptr_t)&next_free >> 12};
    struct kc_sampler_stop_result result;
    struct fake_code freed = codes[0];
    struct fake_frame frame = {.code = &freed, .instruction = freed.bytecode};
    struct fake_thread thread = {.frame = &frame};
    link_thread(&thread, &interpreters[0]);
    for (uint32_t i = 0; i < sizeof written / sizeof *written; i++) {
        freed.references = written[i];
        uint32_t rounds = 0;
        do { /* ticks that were missed count, too */
            const int fd = open_sampler(1000, 1u << 20);
            await_ticks(5);
            CHECK(kc_sampler_stop(LIMIT_MS, &result) == 0);
            CHECK(result.timed_out == 0);
            CHECK(samples_with_stack(fd) == 0);
            CHECK(kc_sampler_close() == 0);
        } while (result.torn_samples == 0 && ++rounds < 50);
        CHECK(result.torn_samples > 0);
    }
    interpreters[0].threads = NULL;
}

struct flip {
    struct fake_thread *thread;
    struct fake_frame *frames[2];
};

/* As if the thread called and returned; in memory that only this thread writes. */
__attribute__((no_sanitize("thread"))) static void *run_flips(void *argument) {
    const struct flip *flip = argument;
    link_thread(flip->thread, &interpreters[0]);
    for (uint32_t i = 0; go_on; i++) {
        __atomic_store_n(&flip->thread->frame, flip->frames[i % 2], __ATOMIC_RELEASE);
    }
    return NULL;
}

/* A frame that is freed and made again while it is read may point to itself, or to one that points to it. */
static void a_circle_that_comes_and_goes_is_survived(void) {
    static _Alignas(4096) struct fake_frame frames[3]; /* in one page */
    struct kc_sampler_stop_result result;
    struct fake_thread thread = {.frame = &frames[0]};
    uint32_t rounds = 0;
    struct flip flip = {&thread, {&frames[0], &frames[2]}};
    pthread_t flipper;
    for (uint32_t i = 0; i < 3; i++) {
        frames[i] = (struct fake_frame){.code = &codes[0], .previous = i == 2 ? NULL : &frames[1 - i]};
    }
    go_on = true;
    CHECK(pthread_create(&flipper, NULL, run_flips, &flip) == 0);
    uint64_t seen = 0;
    do { /* until both have had a processor at the same time for a while */
        (void)open_sampler(4000, 1u << 20);
        await_ticks(200);
        close_sampler(&result);
        seen += result.partial_stacks;
    } while (seen < 100 && ++rounds < 50);
    go_on = false;
    CHECK(pthread_join(flipper, NULL) == 0);
    interpreters[0].threads = NULL;
}

static void a_full_table_is_counted(void) {
    struct kc_sampler_stop_result result;
    struct fake_frame frame = {.code = &codes[0], .instruction = codes[0].bytecode};
    struct fake_thread thread = {.frame = &frame};
    link_thread(&thread, &interpreters[0]);
    (void)open_sampler(1000, 16); /* rounded up to a page; names of threads take it */
    for (uint32_t i = 0; i < 200; i++) {
        (void)kc_sampler_name(i + 1, "a name that fills the table", 27);
    }
    await_ticks(5);
    close_sampler(&result);
    interpreters[0].threads = NULL;
}

int main(void) {
    make_interpreter();
    threads_come_and_go();
    nonsense_is_survived();
    a_freed_function_is_not_believed();
    a_circle_that_comes_and_goes_is_survived();
    a_full_table_is_counted();
    (void)open_sampler(1000, 1u << 20); /* the exit handler ends it */
    await_ticks(3);
    return 0;
}
