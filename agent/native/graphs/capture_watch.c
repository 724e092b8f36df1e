/* See capture_watch.h.
 *
 * Theory of operation
 *   The nodes of a graph are numbered in the order in which a capture adds them. At the beginning and the end of each
 *   operator the driver is queried for their number; nodes that are new since the last query were added in the
 *   innermost operator of the querying thread. Each thread has a stack of its open operators.
 *
 *   A thread takes part in the capture if the stream that it uses at this moment captures into the watched graph:
 *   autograd's threads do, others of the program do not. If a node may be from more than one of them, because another
 *   one made the last query or is inside an operator, it belongs to none: a wrong operator would be worse.
 *
 *   Counting the nodes takes the driver some 10 ns for each of them. In a large graph they are counted only if
 *   necessary: as long as a thread stays on one stream, its new nodes are those between the current end of that stream
 *   and its end at the last query. Nodes added by others in between have no operator. After COUNTING_NS of counting
 *   the rest of a graph has none.
 *
 *   Operators that add no node are not kept: only a node adds its operator, and the enclosing ones, to the table.
 *
 *   An operator that began before the watch is not known. Nodes that it adds on another thread, which cannot take part
 *   before the capture has begun either, can therefore not be distinguished from those of a thread that is inside a
 *   known one.
 *
 *   The callbacks are registered from begin to seal only. One that runs later finds no watch and returns.
 *
 * Threads: begin, seal, take and drop on the program's thread that captures, without the GIL; the callbacks on every
 *   thread that runs an operator meanwhile.
 * Blocks: callbacks for the lock of this file, LOCK_LIMIT_NS at most: it is held for some queries of the driver, which
 *   has its own locks, and never during another wait. If a thread does not get it, the rest of the graph has no
 *   operators. begin, seal, take and drop wait until it is free, and inside torch while callbacks are registered.
 */
#define _GNU_SOURCE
#include "graphs/capture_watch.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/arena.h"
#include "common/error_text.h"
#include "common/wake.h"
#include "graphs/graph_driver.h"
#include "graphs/node_table.h"
#include "torch/libtorch_api.h"
#include "torch/op_inputs.h"
#include "torch/start_callback.h"

#define DEPTH_MOST 128u
#define NAME_BYTES_MOST 1024u
#define SCOPES 3u
#define LARGE 1024u /* nodes */
#define COUNTING_NS 1000000000LL
#define CHAIN_MOST 256u
#define LOCK_LIMIT_NS 20000000LL
#define LOCK_LOOK_NS 20000L

struct frame {
    const void *function;
    uint32_t name;
    uint32_t inputs; /* NODE_TABLE_NONE: not recorded, or its thread did not take part when it began, as autograd's
                      * before they set the stream of an operator */
    uint32_t op;     /* in the table; NODE_TABLE_NONE: it has added no node yet */
    uint8_t scope;
    bool counted; /* counted among the participating operators of this thread */
};

struct stack {
    uint64_t watch; /* to which the rest belongs */
    uint32_t depth;
    uint32_t counted;
    bool inside;
    struct frame frames[DEPTH_MOST];
};

static struct {
    pthread_mutex_t lock;
    bool opened;
    bool fork_hook;
    struct graph_driver driver;
    struct ops_torch torch;
    struct kc_observer_layout layout;
    bool layout_known;
    bool inputs;
    uint64_t watch; /* number of the current one, 0: none */
    uint64_t watches;
    uint64_t id; /* of the capture */
    int8_t device;
    void *stream;
    const struct stack *looked; /* the thread that made the last query */
    const void *looked_stream;  /* the stream that it used */
    const void *last;           /* the end of that stream at the time; NULL: unknown */
    bool uncounted;             /* it did not count */
    int64_t counting_ns;
    uint64_t missed; /* the watch in which a thread did not get the lock in time */
    uint32_t busy;   /* participating threads that are inside an operator */
    struct node_table table;
    uint8_t *sealed;
    size_t sealed_bytes;
    uint64_t handles[SCOPES];
    uint32_t registered;
} self = {.lock = PTHREAD_MUTEX_INITIALIZER};

static _Thread_local struct stack own;

/* ---- operators ---- */

/* The operator to which a new node of this thread belongs. */
static uint32_t innermost(struct stack *stack) {
    uint32_t op = NODE_TABLE_NONE;
    for (uint32_t i = 0; i < stack->depth; i++) {
        struct frame *frame = &stack->frames[i];
        if (frame->op == NODE_TABLE_NONE) {
            const struct op_record record = {
                .parent = op, .name = frame->name, .inputs = frame->inputs, .scope = frame->scope};
            frame->op = node_table_op(&self.table, &record);
        }
        op = frame->op != NODE_TABLE_NONE ? frame->op : op;
    }
    return op;
}

static bool count_nodes(void *graph, size_t *count) {
    const int64_t began = clock_ns(CLOCK_MONOTONIC);
    const bool counted = graph_driver_count(&self.driver, graph, count);
    self.counting_ns += clock_ns(CLOCK_MONOTONIC) - began;
    return counted;
}

/* Assigns the new nodes at the end of the thread's stream to their operator. False: there may be others. */
static bool follow(struct stack *stack, const void *last, bool alone) {
    const void *nodes[CHAIN_MOST];
    if (last == NULL || self.last == NULL) {
        return false;
    }
    if (last == self.last) {
        return true;
    }
    const size_t count = graph_driver_chain(&self.driver, last, self.last, nodes, CHAIN_MOST);
    const uint32_t op = count > 0 && alone ? innermost(stack) : NODE_TABLE_NONE;
    for (size_t i = 0; i < count && op != NODE_TABLE_NONE; i++) {
        node_table_claim(&self.table, nodes[i], op);
    }
    return count > 0;
}

/* Whether a thread did not get its turn in time: the operators of nodes that are added from then on are unknown. */
static bool has_missed(void) { return __atomic_load_n(&self.missed, __ATOMIC_RELAXED) == self.watch; }

/* Assigns the new nodes to their operator. False: this thread takes no part in the capture. */
static bool look(struct stack *stack) {
    struct graph_under_capture found;
    void *stream = graph_driver_current(&self.driver, self.device);
    size_t count = 0;
    if (!graph_driver_captures(&self.driver, stream, &found) || found.id != self.id) {
        return false;
    }
    const bool same = self.looked == stack && self.looked_stream == stream;
    const bool alone = self.looked == stack && self.busy == (stack->counted > 0);
    if (self.counting_ns > COUNTING_NS || has_missed()) {
        return true;
    }
    if (self.table.nodes >= LARGE && same && follow(stack, found.last, alone)) {
        self.last = found.last;
        self.uncounted = true;
        return true;
    }
    if (!count_nodes(found.graph, &count)) {
        return false;
    }
    if (has_missed()) { /* while this thread had the lock: the other one's nodes are among those counted */
        return true;
    }
    if (count > self.table.nodes) {
        node_table_add(&self.table, count, alone && !self.uncounted ? innermost(stack) : NODE_TABLE_NONE);
    }
    self.looked = stack;
    self.looked_stream = stream;
    self.last = found.last;
    self.uncounted = false;
    return true;
}

static uint32_t inputs_of(const void *function) {
    struct ops_inputs inputs;
    ops_describe_inputs(&self.layout, function, &inputs);
    return node_table_text(&self.table, inputs.text, inputs.bytes);
}

static void push(struct stack *stack, const void *function, uint8_t scope, bool part) {
    if (stack->depth == DEPTH_MOST) {
        self.table.full = true;
        return;
    }
    struct frame *frame = &stack->frames[stack->depth++];
    *frame = (struct frame){.function = function,
                            .name = NODE_TABLE_NONE,
                            .inputs = NODE_TABLE_NONE,
                            .op = NODE_TABLE_NONE,
                            .scope = scope,
                            .counted = part && scope != ARENA_SCOPE_USER};
    const char *name = self.torch.name(function);
    name = name == NULL ? "" : name;
    frame->name = node_table_text(&self.table, name, strnlen(name, NAME_BYTES_MOST));
    if (part && self.inputs) {
        frame->inputs = inputs_of(function);
    }
    if (frame->counted && stack->counted++ == 0) {
        self.busy++;
    }
}

static void pop(struct stack *stack, const void *function) {
    uint32_t depth = stack->depth;
    while (depth > 0 && stack->frames[depth - 1].function != function) {
        depth--;
    }
    while (depth > 0 && stack->depth >= depth) { /* those above it have ended on other threads, or never will */
        if (stack->frames[--stack->depth].counted && --stack->counted == 0) {
            self.busy--;
        }
    }
}

/* This thread's stack for the current watch. */
static struct stack *own_stack(void) {
    if (own.watch != self.watch) {
        own.watch = self.watch;
        own.depth = own.counted = 0;
    }
    return &own;
}

static bool lock_in_time(void) {
    const struct timespec pause = {.tv_nsec = LOCK_LOOK_NS};
    int64_t deadline = 0;
    while (pthread_mutex_trylock(&self.lock) != 0) {
        const int64_t now = clock_ns(CLOCK_MONOTONIC);
        deadline = deadline == 0 ? now + LOCK_LIMIT_NS : deadline;
        if (now >= deadline) {
            return false;
        }
        (void)nanosleep(&pause, NULL);
    }
    return true;
}

/* Returns this thread's stack, with the lock; NULL without it if there is no watch. */
static struct stack *enter(void) {
    const uint64_t watch = __atomic_load_n(&self.watch, __ATOMIC_ACQUIRE);
    if (watch == 0 || own.inside) { /* or a signal handler that runs operators */
        return NULL;
    }
    own.inside = true;
    const bool locked = lock_in_time();
    if (!locked) {
        __atomic_store_n(&self.missed, watch, __ATOMIC_RELAXED);
    }
    if (!locked || self.watch == 0) {
        if (locked) {
            pthread_mutex_unlock(&self.lock);
        }
        own.inside = false;
        return NULL;
    }
    return own_stack();
}

static void leave(void) {
    pthread_mutex_unlock(&self.lock);
    own.inside = false;
}

static void begin(const void *function, uint8_t scope) {
    struct stack *stack = enter();
    if (stack != NULL) {
        push(stack, function, scope, look(stack));
        leave();
    }
}

OPS_START(graphs_start_function, begin, ARENA_SCOPE_FUNCTION)
OPS_START(graphs_start_backward, begin, ARENA_SCOPE_BACKWARD_FUNCTION)
OPS_START(graphs_start_user, begin, ARENA_SCOPE_USER)

static void end(const void *function, void *context) {
    (void)context;
    struct stack *stack = enter();
    if (stack != NULL) {
        (void)look(stack);
        pop(stack, function);
        leave();
    }
}

static struct ops_callback callback(uint32_t index, bool inputs) {
    static const uint8_t scopes[SCOPES] = {ARENA_SCOPE_FUNCTION, ARENA_SCOPE_BACKWARD_FUNCTION, ARENA_SCOPE_USER};
    const uintptr_t starts[SCOPES] = {(uintptr_t)graphs_start_function, (uintptr_t)graphs_start_backward,
                                      (uintptr_t)graphs_start_user};
    void (*const end_function)(const void *, void *) = end;
    struct ops_callback made = {.start = (void *)starts[index], // NOLINT: a function
                                .probability = 1.0,
                                .needs_inputs = inputs};
    memcpy(&made.end, &end_function, sizeof made.end);
    made.scopes[scopes[index]] = 1;
    return made;
}

/* With the lock, so that no callback of another thread runs while torch's list changes. */
static void unregister(void) {
    while (self.registered > 0) {
        self.torch.remove(self.handles[--self.registered]);
    }
}

static void end_watch(void) {
    __atomic_store_n(&self.watch, 0, __ATOMIC_RELEASE);
    unregister();
    node_table_clear(&self.table);
}

static void free_sealed(void) {
    free(self.sealed);
    self.sealed = NULL;
    self.sealed_bytes = 0;
}

static void in_forked_child(void) {
    (void)pthread_mutex_init(&self.lock, NULL);
    self.watch = 0;
    own.inside = false;
    node_table_forget(&self.table);
}

/* ---- exported ---- */

uint32_t kc_graphs_abi(void) { return KC_GRAPHS_ABI; }

int kc_graphs_open(const struct kc_graphs_libraries *libraries, const struct kc_observer_layout *layout,
                   uint32_t *layout_fits, char *error, size_t error_bytes) {
    *layout_fits = 0;
    pthread_mutex_lock(&self.lock);
    end_watch();
    self.opened = self.layout_known = false;
    int code = ops_torch_open(&self.torch, libraries->torch, error, error_bytes);
    if (code == 0) {
        code = graph_driver_open(&self.driver, libraries->cuda, libraries->c10_cuda, error, error_bytes);
    }
    if (code == 0 && !ops_torch_takes(&self.torch, callback(0, false))) {
        code = refuse(KC_LIBRARY, error, error_bytes, "this torch does not keep callbacks in the form that is known");
    }
    if (code == 0) {
        self.layout_known = layout != NULL && ops_torch_fits(&self.torch, layout);
        if (self.layout_known) {
            self.layout = *layout;
        }
        *layout_fits = self.layout_known;
        self.opened = true;
    }
    if (!self.fork_hook) {
        self.fork_hook = true;
        (void)pthread_atfork(NULL, NULL, in_forked_child);
    }
    pthread_mutex_unlock(&self.lock);
    return code;
}

int kc_graphs_describe_tensor(const void *tensor, uint8_t *out, uint32_t bytes, uint64_t *storage_data) {
    struct ops_inputs inputs = {.bytes = 0};
    if (!self.layout_known) {
        return KC_ORDER;
    }
    ops_describe_tensor(&self.layout, tensor, &inputs);
    *storage_data = inputs.tensor_count > 0 ? inputs.tensors[0].data : 0;
    memcpy(out, inputs.text, inputs.bytes < bytes ? inputs.bytes : bytes);
    return (int)inputs.bytes;
}

static int begin_watch(void *stream, int8_t device, bool inputs, char *error, size_t error_bytes) {
    struct graph_under_capture found;
    size_t count = 0;
    if (!self.opened) {
        return refuse(KC_ORDER, error, error_bytes, "not open");
    }
    end_watch();
    if (!graph_driver_captures(&self.driver, stream, &found) ||
        !graph_driver_count(&self.driver, found.graph, &count)) {
        return refuse(KC_GRAPHS_CAPTURE, error, error_bytes, "the stream does not capture");
    }
    self.id = found.id;
    self.device = device;
    self.stream = stream;
    self.inputs = inputs && self.layout_known;
    self.looked = &own;
    self.looked_stream = stream;
    self.last = NULL;
    self.uncounted = false;
    self.counting_ns = 0;
    self.busy = 0;
    node_table_add(&self.table, count, NODE_TABLE_NONE);
    __atomic_store_n(&self.watch, ++self.watches, __ATOMIC_RELEASE);
    for (uint32_t i = 0; i < SCOPES; i++) {
        self.handles[i] = self.torch.add(callback(i, self.inputs));
        self.registered++;
    }
    return 0;
}

int kc_graphs_begin(uint64_t stream, int32_t device, uint32_t record_inputs, uint64_t *watch, char *error,
                    size_t error_bytes) {
    pthread_mutex_lock(&self.lock);
    void *const handle = (void *)(uintptr_t)stream; // NOLINT: the driver's handle of the stream
    const int code = begin_watch(handle, (int8_t)device, record_inputs != 0, error, error_bytes);
    *watch = self.watch;
    pthread_mutex_unlock(&self.lock);
    return code;
}

static bool read_nodes(void *graph, struct node_record *nodes, size_t count) {
    void **handles = malloc((count + 1) * sizeof *handles);
    bool read = handles != NULL && graph_driver_nodes(&self.driver, graph, handles, count);
    if (read) {
        node_table_settle(&self.table, handles);
    }
    for (size_t i = 0; read && i < count; i++) {
        struct graph_kernel kernel;
        const int type = graph_driver_describe(&self.driver, handles[i], &kernel);
        read = type >= 0;
        nodes[i] = (struct node_record){.type = (uint32_t)type, .op = self.table.owners[i], .name = NODE_TABLE_NONE};
        memcpy(nodes[i].grid, kernel.grid, sizeof nodes[i].grid);
        memcpy(nodes[i].block, kernel.block, sizeof nodes[i].block);
        if (kernel.name != NULL) {
            nodes[i].name = node_table_text(&self.table, kernel.name, strlen(kernel.name));
        }
    }
    free(handles);
    return read;
}

static int seal(char *error, size_t error_bytes) {
    struct graph_under_capture found;
    size_t count = 0;
    (void)look(own_stack());
    if (!graph_driver_captures(&self.driver, self.stream, &found) || found.id != self.id ||
        !graph_driver_count(&self.driver, found.graph, &count) || count < self.table.nodes) {
        return refuse(KC_GRAPHS_CAPTURE, error, error_bytes, "the capture has failed, or has ended already");
    }
    node_table_add(&self.table, count, NODE_TABLE_NONE);
    struct node_record *nodes = malloc((count + 1) * sizeof *nodes);
    if (nodes != NULL && !self.table.full && read_nodes(found.graph, nodes, count)) {
        self.sealed = node_table_packed(&self.table, nodes, &self.sealed_bytes);
    }
    free(nodes);
    if (self.sealed == NULL) {
        return refuse(KC_GRAPHS_CAPTURE, error, error_bytes,
                      self.table.full ? "the graph has too many nodes, operators or texts"
                                      : "the driver does not describe the graph's nodes");
    }
    return 0;
}

int kc_graphs_seal(uint64_t watch, uint64_t *bytes, char *error, size_t error_bytes) {
    int code = 0;
    *bytes = 0;
    pthread_mutex_lock(&self.lock);
    free_sealed();
    if (watch == 0 || watch != self.watch) {
        code = refuse(KC_ORDER, error, error_bytes, "another capture has begun since");
    } else {
        own.inside = true;
        code = seal(error, error_bytes);
        own.inside = false;
        *bytes = self.sealed_bytes;
        end_watch();
    }
    pthread_mutex_unlock(&self.lock);
    return code;
}

int kc_graphs_take(uint8_t *out, uint64_t bytes) {
    int code = KC_ORDER;
    pthread_mutex_lock(&self.lock);
    if (self.sealed != NULL && bytes == self.sealed_bytes) {
        memcpy(out, self.sealed, bytes);
        code = 0;
    }
    free_sealed();
    pthread_mutex_unlock(&self.lock);
    return code;
}

void kc_graphs_drop(void) {
    pthread_mutex_lock(&self.lock);
    end_watch();
    free_sealed();
    pthread_mutex_unlock(&self.lock);
}
