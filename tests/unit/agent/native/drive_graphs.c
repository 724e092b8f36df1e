/* Drives the watcher of CUDA graph captures against the fake torch and the fake driver, for the sanitizers.
 *
 *   drive_graphs LIBTORCH_CPU
 *
 * Threads that run operators on streams of the capture and on others, while captures begin and end under them; a
 * capture that is given up; a fork in the middle; a thread that is held up in the driver. Exits with 0 if all numbers are right.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "fake_torch.h"
#include "graphs/capture_watch.h"
#include "graphs/node_table.h"

#define THREADS 4u
#define ROUNDS 150u
#define OWN_OPS 20u

static void (*begin)(struct fake_function *, uint8_t, const char *);
static void (*finish)(struct fake_function *);
static void (*capture_begin)(void);
static void (*capture_end)(void);
static void (*use_stream)(int);
static void (*add_node)(int, const char *);
static void (*hold)(int);
static uint64_t (*arrived)(void);

static char error[256];
static atomic_bool go_on = true;
/* Held by an operator that takes part: it is not one that began before the watch, of which nobody knows. */
static pthread_rwlock_t taking_part;

static void *symbol(void *library, const char *name) {
    void *found = dlsym(library, name);
    CHECK(found != NULL);
    return found;
}

static void run_op(const char *name, bool launches) {
    struct fake_function outer, inner;
    begin(&outer, 7, "outer");
    begin(&inner, 0, name);
    if (launches) {
        add_node(0, name);
    }
    finish(&inner);
    finish(&outer);
}

static void *run_ops(void *argument) {
    const int stream = (int)(uintptr_t)argument % 2;
    use_stream(stream * 2); /* none, or the other one of the capture */
    while (go_on) {
        if (stream != 0) {
            pthread_rwlock_rdlock(&taking_part);
        }
        run_op("theirs", stream != 0);
        if (stream != 0) {
            pthread_rwlock_unlock(&taking_part);
        }
    }
    return NULL;
}

static void check_sealed(uint64_t bytes) {
    struct node_table_head head;
    uint8_t *sealed = malloc(bytes);
    CHECK(sealed != NULL && kc_graphs_take(sealed, bytes) == 0);
    memcpy(&head, sealed, sizeof head);
    CHECK(head.bytes == bytes && head.nodes >= OWN_OPS);
    uint32_t own = 0;
    for (uint32_t i = 0; i < head.nodes; i++) {
        struct node_record node;
        struct op_record op;
        memcpy(&node, sealed + sizeof head + i * sizeof node, sizeof node);
        CHECK(node.op == NODE_TABLE_NONE || node.op < head.ops);
        if (node.op != NODE_TABLE_NONE) { /* who has a node, has it rightly */
            memcpy(&op, sealed + sizeof head + head.nodes * sizeof node + node.op * sizeof op, sizeof op);
            CHECK(op.name == node.name);
            own++;
        }
    }
    CHECK(own <= head.nodes);
    free(sealed);
}

static void capture(bool keep) {
    uint64_t watch = 0, bytes = 0;
    pthread_rwlock_wrlock(&taking_part);
    capture_begin();
    CHECK(kc_graphs_begin(1, 0, 0, &watch, error, sizeof error) == 0 && watch > 0);
    pthread_rwlock_unlock(&taking_part);
    for (uint32_t i = 0; i < OWN_OPS; i++) {
        run_op("ours", true);
    }
    if (keep) {
        CHECK(kc_graphs_seal(watch, &bytes, error, sizeof error) == 0);
        check_sealed(bytes);
    } else {
        kc_graphs_drop();
        CHECK(kc_graphs_seal(watch, &bytes, error, sizeof error) == KC_ORDER && bytes == 0);
    }
    capture_end();
}

static void fork_in_the_middle(void) {
    uint64_t watch = 0;
    capture_begin();
    CHECK(kc_graphs_begin(1, 0, 0, &watch, error, sizeof error) == 0);
    const pid_t child = fork();
    if (child == 0) {
        run_op("child", false);
        kc_graphs_drop();
        _exit(0);
    }
    int status = 1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    kc_graphs_drop();
    capture_end();
}

static void *run_one_op(void *argument) {
    use_stream(2);
    run_op(argument, false);
    return NULL;
}

static void check_first_node_has_no_op(uint64_t watch) {
    uint64_t bytes = 0;
    CHECK(kc_graphs_seal(watch, &bytes, error, sizeof error) == 0);
    uint8_t *sealed = malloc(bytes);
    struct node_record node;
    CHECK(sealed != NULL && kc_graphs_take(sealed, bytes) == 0);
    memcpy(&node, sealed + sizeof(struct node_table_head), sizeof node);
    CHECK(node.op == NODE_TABLE_NONE);
    free(sealed);
}

/* The operators of a thread do not wait until another one is out of the driver. The rest of the graph has none. */
static void held_up_in_the_driver(void) {
    uint64_t watch = 0;
    pthread_t thread;
    capture_begin();
    CHECK(kc_graphs_begin(1, 0, 0, &watch, error, sizeof error) == 0);
    hold(1);
    const uint64_t before = arrived();
    CHECK(pthread_create(&thread, NULL, run_one_op, "held up") == 0);
    while (arrived() == before) {
        sched_yield();
    }
    run_op("not held up", false);
    hold(0);
    CHECK(pthread_join(thread, NULL) == 0);
    run_op("afterwards", true);
    check_first_node_has_no_op(watch);
    capture_end();
}

static void *run_op_in_two_steps(void *next) {
    struct fake_function outer, inner;
    use_stream(2);
    begin(&outer, 7, "outer");
    (void)pthread_barrier_wait(next);
    (void)pthread_barrier_wait(next);
    begin(&inner, 0, "held up");
    finish(&inner);
    finish(&outer);
    return NULL;
}

/* While a thread counts the nodes, another one adds some without its turn: they belong to no operator of the first. */
static void held_up_while_it_counts(void) {
    uint64_t watch = 0;
    pthread_t thread;
    pthread_barrier_t next;
    CHECK(pthread_barrier_init(&next, NULL, 2) == 0);
    capture_begin();
    CHECK(kc_graphs_begin(1, 0, 0, &watch, error, sizeof error) == 0);
    CHECK(pthread_create(&thread, NULL, run_op_in_two_steps, &next) == 0);
    (void)pthread_barrier_wait(&next);
    hold(2);
    const uint64_t before = arrived();
    (void)pthread_barrier_wait(&next);
    while (arrived() < before + 2) { /* its query, and its count */
        sched_yield();
    }
    run_op("without its turn", true);
    hold(0);
    CHECK(pthread_join(thread, NULL) == 0);
    check_first_node_has_no_op(watch);
    capture_end();
    CHECK(pthread_barrier_destroy(&next) == 0);
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    void *library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
    pthread_rwlockattr_t writers_first;
    CHECK(pthread_rwlockattr_init(&writers_first) == 0);
    CHECK(pthread_rwlockattr_setkind_np(&writers_first, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP) == 0);
    CHECK(pthread_rwlock_init(&taking_part, &writers_first) == 0);
    *(void **)&begin = symbol(library, "fake_begin");
    *(void **)&finish = symbol(library, "fake_end");
    *(void **)&capture_begin = symbol(library, "fake_capture_begin");
    *(void **)&capture_end = symbol(library, "fake_capture_end");
    *(void **)&use_stream = symbol(library, "fake_use_stream");
    *(void **)&add_node = symbol(library, "fake_add_node");
    *(void **)&hold = symbol(library, "fake_hold");
    *(void **)&arrived = symbol(library, "fake_arrived");
    const struct kc_graphs_libraries libraries = {arguments[1], arguments[1], arguments[1]};
    uint32_t fits = 1;
    CHECK(kc_graphs_open(&libraries, NULL, &fits, error, sizeof error) == 0 && fits == 0);
    capture(true);
    fork_in_the_middle();
    held_up_in_the_driver();
    held_up_while_it_counts();
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, run_ops, (void *)i) == 0);
    }
    for (uint32_t round = 0; round < ROUNDS; round++) {
        capture(round % 8 != 7);
    }
    go_on = false;
    for (uint32_t i = 0; i < THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    return 0;
}
