/* The exported functions of the observer. observer.h describes their use, op_thread.c the callbacks.
 *
 * Theory of operation
 *   Three global callbacks, one for each scope that is recorded, so that the scope of an op is known without reading
 *   it. They are registered only during a recording. An op that began before they were removed still calls its end
 *   callback, at any later time: the code is never unmapped, and without a recording the callbacks return at once.
 *
 *   If a thread is still inside a callback when recording stops (it was preempted in the middle of some hundred
 *   nanoseconds), its arena is retired, and unmapped before a later recording.
 *
 *   Fork: the arena is not mapped in the child (MADV_DONTFORK), its descriptor is closed there, the callbacks that are
 *   still registered there do nothing. torch is not called; a recording of the child's own removes them first. Exit: a
 *   handler makes the callbacks inert and publishes, before the static destructors of torch (registered earlier).
 *
 * Threads: the callbacks run on every thread of the program that runs an op, with or without the GIL; the exported
 *   functions on the agent's without the GIL; at_exit on the thread that exits.
 * Blocks: the callbacks never do. kc_observer_stop waits up to its limit for threads that are inside one, at_exit
 *   likewise. torch may take a lock of its own while callbacks are registered.
 */
#define _GNU_SOURCE
#include "torch/observer.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/arena.h"
#include "torch/collective_info.h"
#include "torch/op_inputs.h"
#include "torch/op_names.h"
#include "torch/op_thread.h"
#include "torch/libtorch_api.h"
#include "torch/start_callback.h"
#include "common/error_text.h"

#define NS_PER_MS 1000000LL
#define BUFFERS_LEAST 2u
#define BUFFERS_MOST 65536u
#define EXIT_LIMIT_MS 20u
#define SCOPES 3u

enum phase { CLOSED, OPENED, PREPARED, RECORDING, STOPPED };

static struct {
    _Atomic enum phase phase;
    _Atomic bool exiting;
    bool process_hooks;
    bool taken_once; /* this torch is known to take our callbacks */
    struct ops_torch torch;
    struct kc_observer_layout layout;
    bool layout_known;
    bool record_inputs;
    struct arena *arena;
    struct arena *retired;
    uint64_t handles[SCOPES];
    uint32_t registered;
    struct ops_totals totals;
} self;

/* ---- the callbacks ---- */

OPS_START(ops_start_function, ops_begin, ARENA_SCOPE_FUNCTION)
OPS_START(ops_start_backward, ops_begin, ARENA_SCOPE_BACKWARD_FUNCTION)
OPS_START(ops_start_user, ops_begin, ARENA_SCOPE_USER)

static void end(const void *function, void *context) {
    (void)context;
    ops_end(function);
}

static struct ops_callback callback(void *start, uint32_t scope) {
    void (*const end_function)(const void *, void *) = end;
    struct ops_callback made = {.start = start, .probability = 1.0, .needs_inputs = self.record_inputs};
    memcpy(&made.end, &end_function, sizeof made.end);
    made.scopes[scope] = 1;
    return made;
}

static struct ops_callback scope_callback(uint32_t index) {
    static const uint8_t scopes[SCOPES] = {ARENA_SCOPE_FUNCTION, ARENA_SCOPE_BACKWARD_FUNCTION, ARENA_SCOPE_USER};
    const uintptr_t starts[SCOPES] = {(uintptr_t)ops_start_function, (uintptr_t)ops_start_backward,
                                      (uintptr_t)ops_start_user};
    return callback((void *)starts[index], scopes[index]); // NOLINT: a function
}

static void unregister(void) {
    while (self.registered > 0) {
        self.torch.remove(self.handles[--self.registered]);
    }
}

/* ---- fork and exit ---- */

static void in_forked_child(void) {
    ops_threads_forked();
    if (self.arena != NULL) {
        arena_close(self.arena); /* otherwise the daemon would not see the end of this process */
        free(self.arena);
        self.arena = NULL;
    }
    self.retired = NULL;
    self.phase = CLOSED;
}

/* Returns true to the one caller that ends the recording. */
static bool end_recording(uint32_t limit_ms) {
    enum phase recording = RECORDING;
    ops_threads_close();
    if (!atomic_compare_exchange_strong(&self.phase, &recording, STOPPED)) {
        return false;
    }
    if (!self.exiting) {
        unregister();
    }
    ops_threads_collect(limit_ms * NS_PER_MS, &self.totals);
    arena_store(self.arena, ARENA_CLOSED, 1);
    return true;
}

static void at_exit(void) {
    self.exiting = true;
    (void)end_recording(EXIT_LIMIT_MS);
}

static void hook_process(void) {
    if (!self.process_hooks) {
        self.process_hooks = true;
        (void)pthread_atfork(NULL, NULL, in_forked_child);
        (void)atexit(at_exit);
    }
}

/* ---- exported ---- */

uint32_t kc_observer_abi(void) { return KC_OBSERVER_ABI; }

int kc_observer_open(const char *path, const struct kc_observer_layout *layout, uint32_t *layout_fits, char *error,
                     size_t error_bytes) {
    *layout_fits = 0;
    if (self.phase > OPENED || self.exiting) {
        return refuse(KC_ORDER, error, error_bytes, "a recording of operators is still open");
    }
    self.phase = CLOSED;
    const int code = ops_torch_open(&self.torch, path, error, error_bytes);
    if (code != 0) {
        return code;
    }
    ops_comms_open(path);
    self.record_inputs = false;
    if (!self.taken_once && !ops_torch_takes(&self.torch, scope_callback(0))) {
        return refuse(KC_OBSERVER_CALLBACK, error, error_bytes,
                      "this torch does not keep callbacks in the form that is known");
    }
    self.taken_once = true;
    self.layout_known = layout != NULL && ops_torch_fits(&self.torch, layout);
    if (self.layout_known) {
        self.layout = *layout;
    }
    *layout_fits = self.layout_known;
    self.phase = OPENED;
    return 0;
}

int kc_observer_describe_tensor(const void *tensor, uint8_t *out, uint32_t bytes, uint64_t *storage_data) {
    struct ops_inputs inputs = {.bytes = 0};
    if (self.phase == CLOSED || !self.layout_known) {
        return KC_ORDER;
    }
    ops_describe_tensor(&self.layout, tensor, &inputs);
    *storage_data = inputs.tensor_count > 0 ? inputs.tensors[0].data : 0;
    memcpy(out, inputs.text, inputs.bytes < bytes ? inputs.bytes : bytes);
    return (int)inputs.bytes;
}

static uint32_t buffer_count(const struct kc_observer_config *config) {
    const uint64_t number = config->buffer_limit_bytes / config->buffer_bytes;
    return number < BUFFERS_LEAST ? BUFFERS_LEAST : number > BUFFERS_MOST ? BUFFERS_MOST : (uint32_t)number;
}

static void destroy(struct arena *arena) {
    arena_destroy(arena);
    free(arena);
}

static void free_retired(void) {
    while (self.retired != NULL && !ops_threads_inside()) {
        struct arena *arena = self.retired;
        self.retired = arena->next;
        destroy(arena);
    }
}

int kc_observer_prepare(const struct kc_observer_config *config, char *error, size_t error_bytes) {
    if (self.phase != OPENED) {
        return refuse(KC_ORDER, error, error_bytes, "not open, or a recording of operators is still open");
    }
    if (self.retired != NULL) {
        free_retired();
        if (self.retired != NULL) {
            return refuse(KC_ORDER, error, error_bytes, "a thread is still inside the previous recording");
        }
    }
    const int number = ops_threads_prepare();
    if (number != 0) {
        return refuse_system(error, error_bytes, "mmap", number);
    }
    const char *step = "malloc";
    struct arena *arena = malloc(sizeof *arena);
    if (arena == NULL) {
        return refuse(KC_SYSTEM, error, error_bytes, "out of memory");
    }
    const int failed = arena_create(arena, buffer_count(config), config->buffer_bytes, config->strings_bytes, &step);
    if (failed != 0) {
        free(arena);
        return refuse_system(error, error_bytes, step, failed);
    }
    arena_populate(arena, config->prefault_bytes);
    ops_names_reset();
    hook_process();
    self.arena = arena;
    self.record_inputs = config->record_inputs != 0 && self.layout_known;
    memset(&self.totals, 0, sizeof self.totals);
    self.phase = PREPARED;
    return arena->fd;
}

int kc_observer_start(char *error, size_t error_bytes) {
    if (self.phase != PREPARED || self.exiting) {
        return refuse(KC_ORDER, error, error_bytes, "not prepared");
    }
    unregister(); /* those inherited by a forked child */
    self.phase = RECORDING;
    ops_threads_open(self.arena, self.layout_known ? &self.layout : NULL, self.record_inputs, self.torch.name,
                     self.torch.thread);
    for (uint32_t i = 0; i < SCOPES; i++) {
        self.handles[i] = self.torch.add(scope_callback(i));
        self.registered++;
    }
    return 0;
}

int kc_observer_counts(struct kc_counts *counts) {
    memset(counts, 0, sizeof *counts);
    if (self.phase < PREPARED) {
        return KC_ORDER;
    }
    counts->records = arena_load(self.arena, ARENA_RECORDS);
    counts->bytes = arena_load(self.arena, ARENA_VALID_BYTES);
    counts->dropped = arena_load(self.arena, ARENA_DROPPED);
    return 0;
}

int kc_observer_stop(uint32_t limit_ms, struct kc_observer_stop_result *result) {
    memset(result, 0, sizeof *result);
    if (!end_recording(limit_ms)) {
        return KC_ORDER;
    }
    (void)kc_observer_counts(&result->counts);
    result->names_lost = ops_names_lost(ARENA_SPACE_OP_NAME);
    result->inputs_lost = ops_names_lost(ARENA_SPACE_OP_INPUTS);
    result->ended_elsewhere = self.totals.ended_elsewhere;
    result->unfinished = self.totals.unfinished;
    result->too_deep = self.totals.too_deep;
    result->unserved = self.totals.unserved;
    result->threads = self.totals.threads;
    result->stuck = self.totals.stuck;
    return 0;
}

int kc_observer_close(void) {
    struct kc_observer_stop_result ignored;
    if (self.phase < PREPARED) {
        return 0;
    }
    (void)kc_observer_stop(EXIT_LIMIT_MS, &ignored);
    if (self.exiting) {
        return 0; /* the exit handler may be using the arena */
    }
    struct arena *arena = self.arena;
    self.arena = NULL;
    self.phase = OPENED;
    if (self.totals.stuck > 0) {
        arena_close(arena);
        arena->next = self.retired;
        self.retired = arena;
    } else {
        destroy(arena);
    }
    return 0;
}
