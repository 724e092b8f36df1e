/* Drives the observer of operators against the fake torch in one program, for the sanitizers.
 *
 *   drive_ops LIBTORCH_CPU
 *
 * Threads that run ops while a daemon recycles; recordings that begin and end under them; no room; ops that end
 * elsewhere, never, or too deep; inputs of every kind; more threads one after another than there are slots; a fork in
 * the middle; an exit in the middle. Exits with 0 if all numbers are right.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/arena.h"
#include "fake_torch.h"
#include "torch/observer.h"
#include "ops_view.h"

#define THREADS 6u
#define ROUNDS 2000u
#define OPS_A_ROUND 4u
#define SERIAL_THREADS 2200u
#define LIMIT_MS 5000u

static void (*begin)(struct fake_function *, uint8_t, const char *);
static void (*begin_with)(struct fake_function *, const char *, int64_t, uint64_t, const struct fake_value *, uint64_t);
static void (*finish)(struct fake_function *);
static void (*set_strange)(int);

static const char *library_path;
static atomic_bool go_on;

static const struct kc_observer_layout layout = {
    .function_bytes = sizeof(struct fake_function),
    .function_scope = offsetof(struct fake_function, scope),
    .function_sequence = offsetof(struct fake_function, sequence),
    .function_inputs = offsetof(struct fake_function, inputs),
    .function_forward_thread = offsetof(struct fake_function, forward_thread),
    .value_bytes = sizeof(struct fake_value),
    .value_payload = offsetof(struct fake_value, payload),
    .value_tag = offsetof(struct fake_value, tag),
    .tag_none = FAKE_NONE,
    .tag_tensor = FAKE_TENSOR,
    .tag_double = FAKE_DOUBLE,
    .tag_int = FAKE_INT,
    .tag_bool = FAKE_BOOL,
    .tag_list = FAKE_LIST,
    .list_values = offsetof(struct fake_list, begin),
    .tensor_storage = offsetof(struct fake_tensor, storage),
    .tensor_sizes = offsetof(struct fake_tensor, dims),
    .tensor_dtype = offsetof(struct fake_tensor, dtype),
    .tensor_policy = offsetof(struct fake_tensor, policy),
    .tensor_policy_mask = 12,
    .tensor_symbolic = offsetof(struct fake_tensor, symbolic),
    .tensor_symbolic_mask = 16,
    .sizes_count = 0,
    .sizes_values = 8,
    .sizes_inline = 5,
    .storage_data = offsetof(struct fake_storage, data),
    .dtypes = FAKE_DTYPES,
};

static void *symbol(void *library, const char *name) {
    void *found = dlsym(library, name);
    CHECK(found != NULL);
    return found;
}

static void load_fake(void) {
    void *library = dlopen(library_path, RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
    *(void **)&begin = symbol(library, "fake_begin");
    *(void **)&begin_with = symbol(library, "fake_begin_with");
    *(void **)&finish = symbol(library, "fake_end");
    *(void **)&set_strange = symbol(library, "fake_set_strange");
}

/* ---- recordings ---- */

static struct view view;

static void prepare_with(uint64_t limit, uint32_t inputs) {
    char error[256] = "";
    uint32_t fits = 0;
    const struct kc_observer_config config = {limit, 4096, 1 << 20, 1 << 20, inputs, 0};
    CHECK(kc_observer_open(library_path, &layout, &fits, error, sizeof error) == 0);
    CHECK(fits == 1);
    const int fd = kc_observer_prepare(&config, error, sizeof error);
    CHECK(fd >= 0);
    view = map(fd);
    seen_count = 0;
}

static void start_with(uint64_t limit, uint32_t inputs) {
    char error[256] = "";
    prepare_with(limit, inputs);
    CHECK(kc_observer_start(error, sizeof error) == 0);
}

static struct kc_observer_stop_result stop_all(void) {
    struct kc_observer_stop_result result;
    CHECK(kc_observer_stop(LIMIT_MS, &result) == 0);
    CHECK(result.stuck == 0 && result.names_lost == 0);
    (void)drain(&view);
    return result;
}

static void close_all(void) {
    munmap(view.base, view.fixed.total_bytes);
    CHECK(kc_observer_close() == 0);
}

static const struct op *find(const char *name) {
    for (uint32_t i = 0; i < seen_count; i++) {
        if (seen[i].kind == ARENA_KIND_OP && is_named(&view, seen[i].name, name)) {
            return &seen[i];
        }
    }
    return NULL;
}

/* ---- what the threads do ---- */

static void run_round(void) {
    struct fake_function scope, outer, inner;
    char name[32];
    snprintf(name, sizeof name, "scope %d", (int)(syscall(SYS_gettid) % 100)); /* a temporary */
    begin(&scope, ARENA_SCOPE_USER, name);
    begin(&outer, ARENA_SCOPE_FUNCTION, "outer");
    begin(&inner, ARENA_SCOPE_FUNCTION, "inner");
    finish(&inner);
    begin(&inner, ARENA_SCOPE_BACKWARD_FUNCTION, "inner backward");
    finish(&inner);
    finish(&outer);
    finish(&scope);
}

static void *run_rounds(void *argument) {
    for (uintptr_t i = 0; i < (uintptr_t)argument; i++) {
        run_round();
    }
    return NULL;
}

static void *run_on(void *unused) {
    (void)unused;
    while (atomic_load(&go_on)) {
        run_round();
    }
    return NULL;
}

static void *end_it(void *function) {
    finish(function);
    return NULL;
}

static void in_thread(void *(*body)(void *), void *argument) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, body, argument) == 0);
    pthread_join(thread, NULL);
}

static void threads_start(pthread_t *threads, void *(*body)(void *), void *argument) {
    for (uint32_t i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, body, argument) == 0);
    }
}

static void threads_join(pthread_t *threads) {
    for (uint32_t i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
}

/* ---- scenarios ---- */

static void test_every_op_of_every_thread(void) {
    pthread_t threads[THREADS];
    uint64_t records = 0;
    start_with(4 << 20, 0);
    threads_start(threads, run_rounds, (void *)(uintptr_t)ROUNDS);
    struct kc_counts counts = {0};
    const uint64_t expected = (uint64_t)THREADS * ROUNDS * OPS_A_ROUND;
    while (counts.records + counts.dropped < expected / 2) {
        records += drain(&view);
        CHECK(kc_observer_counts(&counts) == 0);
    }
    threads_join(threads);
    const uint32_t before = seen_count;
    const struct kc_observer_stop_result result = stop_all();
    records += seen_count - before;
    CHECK(result.counts.records + result.counts.dropped == expected);
    CHECK(result.counts.dropped > 0 || records == expected);
    CHECK(result.threads == THREADS && result.unfinished == 0 && result.ended_elsewhere == 0);
    for (uint32_t i = 0; i < seen_count; i++) {
        CHECK(seen[i].start <= seen[i].end && seen[i].flags == 0 && seen[i].thread != 0 && seen[i].sequence == -1);
    }
    CHECK(find("inner backward")->scope == ARENA_SCOPE_BACKWARD_FUNCTION);
    CHECK(find("outer")->scope == ARENA_SCOPE_FUNCTION);
    uint32_t length = 0;
    CHECK(text_of(&view, seen[0].thread, ARENA_SPACE_TORCH_THREAD, &length) != NULL && length == 8);
    close_all();
}

static void test_recordings_under_running_threads(void) {
    pthread_t threads[THREADS];
    atomic_store(&go_on, true);
    threads_start(threads, run_on, NULL);
    for (uint32_t i = 0; i < 60; i++) {
        start_with(1 << 20, i % 2);
        struct kc_counts counts = {0};
        while (counts.records < 100) {
            (void)drain(&view);
            CHECK(kc_observer_counts(&counts) == 0);
        }
        (void)stop_all();
        close_all();
    }
    atomic_store(&go_on, false);
    threads_join(threads);
}

static void test_without_room_ops_are_counted_as_dropped(void) {
    start_with(2 * 4096, 0);
    (void)run_rounds((void *)(uintptr_t)200);
    const struct kc_observer_stop_result result = stop_all();
    CHECK(result.counts.records == 2 * 4096 / sizeof(struct op));
    CHECK(result.counts.records + result.counts.dropped == 200 * OPS_A_ROUND);
    close_all();
}

static void test_an_op_that_ends_on_another_thread(void) {
    struct fake_function async, plain;
    start_with(1 << 20, 0);
    begin(&async, ARENA_SCOPE_USER, "async");
    in_thread(end_it, &async);
    begin(&plain, ARENA_SCOPE_FUNCTION, "plain");
    finish(&plain);
    const struct kc_observer_stop_result result = stop_all();
    CHECK(result.ended_elsewhere == 1 && result.unfinished == 0 && seen_count == 2);
    CHECK(find("async")->flags == ARENA_OP_ENDED_ELSEWHERE && find("async")->end >= find("async")->start);
    CHECK(find("plain")->flags == 0);
    close_all();
}

static void test_an_op_that_never_ends(void) {
    struct fake_function open, inner, lost;
    start_with(1 << 20, 0);
    begin(&open, ARENA_SCOPE_USER, "open");
    begin(&inner, ARENA_SCOPE_FUNCTION, "inner");
    begin(&lost, ARENA_SCOPE_FUNCTION, "lost");
    finish(&inner);
    const struct kc_observer_stop_result result = stop_all();
    CHECK(result.ended_elsewhere == 1 && result.unfinished == 1 && seen_count == 3);
    CHECK(find("lost")->flags == ARENA_OP_ENDED_ELSEWHERE && find("lost")->end == 0);
    CHECK(find("open")->flags == ARENA_OP_UNFINISHED && find("open")->end == 0);
    CHECK(find("inner")->flags == 0);
    close_all();
    finish(&open); /* after its recording */
    finish(&lost);
}

static void test_too_deep(void) {
    static struct fake_function functions[300];
    start_with(1 << 20, 0);
    for (uint32_t i = 0; i < 300; i++) {
        begin(&functions[i], ARENA_SCOPE_FUNCTION, i == 255 ? "last" : "deep");
    }
    for (uint32_t i = 300; i-- > 0;) {
        finish(&functions[i]);
    }
    const struct kc_observer_stop_result result = stop_all();
    CHECK(result.too_deep == 44 && result.counts.dropped == 44 && result.counts.records == 256);
    CHECK(result.unfinished == 0 && result.ended_elsewhere == 0 && find("last")->number == 255);
    close_all();
}

static void test_threads_one_after_another(void) {
    start_with(8 << 20, 0);
    for (uint32_t i = 0; i < SERIAL_THREADS; i++) {
        in_thread(run_rounds, (void *)(uintptr_t)1);
        (void)drain(&view);
    }
    const struct kc_observer_stop_result result = stop_all();
    CHECK(result.threads == SERIAL_THREADS && result.unserved == 0);
    CHECK(result.counts.records == (uint64_t)SERIAL_THREADS * OPS_A_ROUND);
    close_all();
}

static uint64_t bits(double value) {
    uint64_t result;
    memcpy(&result, &value, sizeof result);
    return result;
}

static struct fake_value value(uint32_t tag, uint64_t payload) { return (struct fake_value){payload, tag, 0}; }

static struct fake_value pointer_value(uint32_t tag, const void *object) {
    return value(tag, (uint64_t)(uintptr_t)object);
}

static void test_inputs(void) {
    int64_t outside[34];
    struct fake_storage storage = {.data = 0x1234};
    struct fake_tensor plain = {.storage = &storage, .dims = 2, .values.own = {3, 4, 0, 0, 0, 4, 1}, .dtype = 6};
    struct fake_tensor large = {.dims = 17, .values.outside = outside, .dtype = 7};
    struct fake_tensor sparse = {.dims = 1, .values.own = {9}, .dtype = 6, .policy = 1 << 2};
    struct fake_tensor nested = {.dims = 99, .dtype = 6, .policy = 2 << 2};
    struct fake_tensor symbolic = {.dims = 99, .dtype = 6, .symbolic = 16};
    struct fake_tensor undefined = {.dims = 99, .dtype = FAKE_DTYPES};
    struct fake_value many[40], scalars[3], strings[1] = {value(FAKE_STRING, 8)};
    struct fake_function function;
    uint32_t length = 0;
    for (uint32_t i = 0; i < 34; i++) {
        outside[i] = i;
    }
    for (uint32_t i = 0; i < 40; i++) {
        many[i] = pointer_value(FAKE_TENSOR, &plain);
    }
    scalars[0] = value(FAKE_INT, 5);
    scalars[1] = value(FAKE_DOUBLE, bits(0.5));
    scalars[2] = value(FAKE_BOOL, 1);
    struct fake_list tensors = {.begin = many, .end = many + 40}, numbers = {.begin = scalars, .end = scalars + 3};
    struct fake_list texts = {.begin = strings, .end = strings + 1}, empty = {.begin = NULL};
    const struct fake_value all[] = {
        pointer_value(FAKE_TENSOR, &plain),
        pointer_value(FAKE_TENSOR, &large),
        pointer_value(FAKE_TENSOR, &sparse),
        pointer_value(FAKE_TENSOR, &nested),
        pointer_value(FAKE_TENSOR, &symbolic),
        pointer_value(FAKE_TENSOR, &undefined),
        value(FAKE_INT, 7),
        value(FAKE_DOUBLE, bits(1.5)),
        value(FAKE_BOOL, 1),
        value(FAKE_NONE, 0),
        value(FAKE_STRING, 8),
        pointer_value(FAKE_LIST, &numbers),
        pointer_value(FAKE_LIST, &texts),
        pointer_value(FAKE_LIST, &empty),
        pointer_value(FAKE_LIST, &tensors),
    };
    start_with(1 << 20, 1);
    begin_with(&function, "op", 42, 3, all, sizeof all / sizeof all[0]);
    finish(&function);
    for (uint32_t i = 0; i < 2; i++) { /* the same form is one entry */
        begin_with(&function, "many", -1, 0, many, 40);
        finish(&function);
    }
    const struct kc_observer_stop_result result = stop_all();
    CHECK(result.inputs_lost == 0);
    const struct op *op = find("op");
    CHECK(op->sequence == 42 && op->forward_thread == 3 && op->scope == ARENA_SCOPE_BACKWARD_FUNCTION);
    const uint8_t *entry = text_of(&view, op->inputs, ARENA_SPACE_OP_INPUTS, &length);
    CHECK(entry != NULL && entry[0] == 15 && entry[1] == 0);
    CHECK(entry[2] == 1 && entry[3] == 6 && entry[4] == 2 && entry[5] == 0 && entry[6] == 3); /* plain */
    entry += 2 + 1 + 3 + 32;
    CHECK(entry[0] == 1 && entry[1] == 7 && entry[2] == 16 && entry[3] == 4); /* large: cut to 16 dimensions */
    CHECK(entry[4 + 8 * 15] == 15 && entry[4 + 8 * 16] == 17);
    entry += 4 + 256;
    CHECK(entry[0] == 1 && entry[2] == 1 && entry[3] == 2 && entry[4] == 9); /* sparse: no strides */
    entry += 4 + 8;
    CHECK(entry[2] == 0 && entry[3] == 3 && entry[6] == 0 && entry[7] == 3 && entry[9] == 255);
    entry += 12;
    CHECK(entry[0] == 3 && entry[1] == 7 && entry[9] == 4 && entry[18] == 5 && entry[20] == 7 && entry[21] == 0);
    entry += 22;
    CHECK(entry[0] == 6 && entry[1] == 3 && entry[2] == 0 && entry[3] == 3 && entry[12] == 4 && entry[21] == 5);
    entry += 23;
    CHECK(entry[0] == 0 && entry[1] == 6 && entry[2] == 0 && entry[4] == 2 && entry[5] == 32 && entry[6] == 1);
    CHECK(find("many")->inputs != op->inputs);
    entry = text_of(&view, find("many")->inputs, ARENA_SPACE_OP_INPUTS, &length);
    CHECK(entry != NULL && entry[0] == 32 && entry[1] == 1 && length == 2 + 32 * 36);
    uint32_t tensor_records = 0;
    for (uint32_t i = 0; i < seen_count; i++) {
        tensor_records += seen[i].kind == ARENA_KIND_OP_TENSORS;
    }
    CHECK(tensor_records == (5 + 32 + 2) / 3 + 2 * 11);
    CHECK(seen[0].kind == ARENA_KIND_OP_TENSORS && seen[0].start == (uint64_t)(uintptr_t)&plain);
    CHECK(seen[0].end == 0x1234);
    close_all();
}

static void test_another_form_of_callbacks_is_refused(void) {
    char error[256] = "";
    uint32_t fits = 1;
    set_strange(1);
    CHECK(kc_observer_open(library_path, &layout, &fits, error, sizeof error) == KC_OBSERVER_CALLBACK);
    set_strange(0);
    CHECK(kc_observer_open("/nowhere/libtorch_cpu.so", &layout, &fits, error, sizeof error) == KC_LIBRARY);
    struct kc_observer_layout wrong = layout;
    wrong.function_sequence += 8;
    CHECK(kc_observer_open(library_path, &wrong, &fits, error, sizeof error) == 0 && fits == 0);
    wrong = layout;
    wrong.function_bytes -= 8;
    CHECK(kc_observer_open(library_path, &wrong, &fits, error, sizeof error) == 0 && fits == 0);
}

static void in_child(void) {
    run_round(); /* the parent's recording is not the child's */
    start_with(1 << 20, 0);
    run_round();
    const struct kc_observer_stop_result result = stop_all();
    CHECK(result.counts.records == OPS_A_ROUND && result.threads == 1);
    close_all();
}

static void test_fork_in_the_middle(void) {
    start_with(1 << 20, 0);
    run_round();
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        in_child();
        _exit(0);
    }
    int status = 1;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    run_round();
    CHECK(stop_all().counts.records == 2 * OPS_A_ROUND);
    close_all();
    start_with(1 << 20, 0);
    run_round();
    CHECK(stop_all().counts.records == OPS_A_ROUND);
    close_all();
}

static void test_exit_in_the_middle(void) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        pthread_t threads[THREADS];
        start_with(1 << 20, 0);
        atomic_store(&go_on, true);
        threads_start(threads, run_on, NULL);
        exit(0); /* NOLINT: that is the point */
    }
    int status = 1;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    library_path = arguments[1];
    seen = calloc(SEEN_MOST, sizeof *seen);
    CHECK(seen != NULL);
    load_fake();
    test_another_form_of_callbacks_is_refused();
    test_every_op_of_every_thread();
    test_without_room_ops_are_counted_as_dropped();
    test_an_op_that_ends_on_another_thread();
    test_an_op_that_never_ends();
    test_too_deep();
    test_inputs();
    test_threads_one_after_another();
    test_recordings_under_running_threads();
    test_fork_in_the_middle();
    test_exit_in_the_middle();
    free(seen);
    return 0;
}
