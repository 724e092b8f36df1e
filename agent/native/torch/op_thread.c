/* The per-thread work while ops are recorded.
 *
 * Theory of operation
 *   Each thread has a slot, which only it uses: a stack of its open ops and a buffer of the arena. An op is pushed when
 *   it begins; when it ends it is popped and written, 64 bytes. Full buffers are made READY at once, others with the
 *   first record after PUBLISH_PERIOD_NS, when the thread ends, and when recording stops.
 *
 *   `inside` is 1 while the slot's thread is in this file. It is set before `recording` is read, and `recording` is
 *   cleared before `inside` is read (sequentially consistent on all sides): the thread that has cleared the one and
 *   then sees 0 in the other has the slot to itself until the next recording. A slot that belongs to an older recording
 *   is reset by its thread. Slots are never unmapped; a thread that ends gives its slot back (pthread_key).
 *
 *   An end is paired with the op of the same RecordFunction in the stack of its thread. Ops above it there have ended
 *   on another thread (futures), or never will. An end without such an op belongs to one that began on another thread,
 *   which is notified (cross_thread_ends.h), or before the recording. Beyond DEPTH_MOST open ops, ops are dropped.
 *
 *   No lock, no allocation; system calls only for the thread's id, once a recording, and for its slot.
 *
 * Threads: ops_begin and ops_end run on threads of the program, inside an op; thread_ends where one of them ends; the
 *   rest on the agent's.
 * Blocks: ops_begin and ops_end never do. thread_ends yields the processor FINISH_TRIES times at most;
 *   ops_threads_collect yields the processor until the threads that are inside have left, up to its limit.
 */
#define _GNU_SOURCE
#include "torch/op_thread.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "torch/op_buffer.h"
#include "torch/collective_info.h"
#include "torch/cross_thread_ends.h"
#include "torch/op_inputs.h"
#include "common/text_hash.h"
#include "torch/op_names.h"
#include "common/wake.h"

#define THREADS_MOST 2048u
#define DEPTH_MOST 256u
#define NAME_BYTES_MOST 1024u
#define FINISH_TRIES 100u

struct frame {
    const void *function;
    uint64_t start;
    uint64_t name;
    int64_t sequence;
    uint64_t forward_thread;
    uint64_t inputs;
    uint32_t number;
    uint8_t scope;
};

struct slot {
    _Alignas(64) uint32_t taken; /* a thread has it */
    uint32_t inside;             /* and is in a callback */
    uint64_t recording;          /* to which the rest belongs */
    uint64_t torch_thread;
    uint64_t elsewhere_seen;
    struct ops_buffer buffer;
    uint32_t stuck;     /* still inside when the agent's thread stopped waiting */
    uint32_t left;      /* its thread has ended, with texts still to write */
    uint32_t announced; /* torch_thread is in the string table, or it is full */
    uint32_t thread;
    uint32_t number; /* of the next op */
    uint32_t depth;
    uint32_t overflowed; /* open ops that had no room in the stack */
    struct ops_late late;
    struct frame frames[DEPTH_MOST];
};

static struct {
    uint64_t recording; /* number of the current one, 0: none */
    uint64_t recordings;
    struct slot *slots;
    uint32_t top; /* one past the highest slot ever taken */
    pthread_key_t key;
    struct arena *arena;
    struct kc_observer_layout layout;
    bool layout_known;
    bool inputs;
    uint64_t comms; /* key of the name of ops that describe a collective */
    const char *(*name)(const void *);
    uint64_t (*thread_number)(void);
    struct ops_totals totals;
} ops;

static _Thread_local struct slot *own;
static _Thread_local uint64_t unserved; /* the recording in which this thread got no slot */

static uint64_t now_ns(void) { return (uint64_t)clock_ns(CLOCK_REALTIME); }

static void count(uint64_t *total) { __atomic_fetch_add(total, 1, __ATOMIC_RELAXED); }

/* ---- records ---- */

static void write_op(struct slot *slot, const struct frame *frame, uint64_t end, uint8_t flags, uint64_t now) {
    const struct ops_record record = {.start = frame->start,
                                      .end = end,
                                      .name = frame->name,
                                      .sequence = frame->sequence,
                                      .forward_thread = frame->forward_thread,
                                      .inputs = frame->inputs,
                                      .thread = slot->thread,
                                      .number = frame->number,
                                      .kind = ARENA_KIND_OP,
                                      .scope = frame->scope,
                                      .flags = flags};
    ops_buffer_append(&slot->buffer, &record, now);
}

/* ---- slots ---- */

/* The key if it is in the string table or will be; else 0. */
static uint64_t intern(struct slot *slot, uint32_t space, const void *data, uint32_t bytes) {
    const uint64_t key = text_hash(data, bytes, space);
    const enum ops_interned result = ops_intern(ops.arena, key, space, data, bytes);
    if (result == OPS_LATER) {
        ops_late_keep(&slot->late, key, space, data, bytes);
    }
    return result == OPS_REFUSED ? 0 : key;
}

/* Writes texts that could not be written before, and this thread's number. */
static void catch_up(struct slot *slot) {
    if (slot->late.used > 0) {
        ops_late_write(&slot->late, ops.arena);
    }
    if (!slot->announced) {
        slot->announced = ops_add_text(ops.arena, slot->thread, ARENA_SPACE_TORCH_THREAD, &slot->torch_thread,
                                       sizeof slot->torch_thread) != OPS_LATER;
    }
}

static void begin_recording(struct slot *slot, uint64_t recording) {
    slot->recording = recording;
    ops_buffer_begin(&slot->buffer, ops.arena);
    slot->depth = 0;
    slot->overflowed = 0;
    slot->late.used = 0;
    slot->number = 0;
    slot->elsewhere_seen = ops_elsewhere_count();
    slot->announced = 0;
    slot->thread = (uint32_t)syscall(SYS_gettid);
    slot->torch_thread = ops.thread_number();
    count(&ops.totals.threads);
}

static void leave(struct slot *slot) { __atomic_store_n(&slot->inside, 0, __ATOMIC_RELEASE); }

/* Ends the open ops from `depth` on, which did not end on this thread (or not yet). */
static void abandon(struct slot *slot, uint32_t depth, bool stopping, uint64_t now) {
    while (slot->depth > depth) {
        const struct frame *frame = &slot->frames[--slot->depth];
        const uint64_t end = ops_elsewhere_take(frame->function, frame->start);
        const bool unfinished = stopping && end == 0;
        count(unfinished ? &ops.totals.unfinished : &ops.totals.ended_elsewhere);
        write_op(slot, frame, end, unfinished ? ARENA_OP_UNFINISHED : ARENA_OP_ENDED_ELSEWHERE, now);
    }
}

/* Returns false if other threads were writing texts all the time and some of this slot's have to be tried again. */
static bool finish(struct slot *slot, bool stopping) {
    for (uint32_t i = 0; i < FINISH_TRIES && (slot->late.used > 0 || !slot->announced); i++) {
        catch_up(slot);
        if (i > 0) {
            sched_yield();
        }
    }
    abandon(slot, 0, stopping, now_ns());
    ops_buffer_publish(&slot->buffer);
    if (slot->late.used > 0 || !slot->announced) {
        return false;
    }
    slot->recording = 0;
    return true;
}

static void thread_ends(void *argument) {
    struct slot *slot = argument;
    own = NULL;
    __atomic_store_n(&slot->inside, 1, __ATOMIC_SEQ_CST);
    const uint64_t recording = __atomic_load_n(&ops.recording, __ATOMIC_SEQ_CST);
    const bool finished = recording == 0 || slot->recording != recording || finish(slot, false);
    if (!finished) {
        slot->left = 1; /* the agent's thread finishes it */
    }
    leave(slot);
    if (finished) {
        __atomic_store_n(&slot->taken, 0, __ATOMIC_RELEASE);
    }
}

static struct slot *take_slot(void) {
    for (uint32_t i = 0; i < THREADS_MOST; i++) {
        uint32_t expected = 0;
        struct slot *slot = &ops.slots[i];
        if (__atomic_load_n(&slot->taken, __ATOMIC_RELAXED) == 0 &&
            __atomic_compare_exchange_n(&slot->taken, &expected, 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
            uint32_t top = __atomic_load_n(&ops.top, __ATOMIC_RELAXED);
            while (top <= i &&
                   !__atomic_compare_exchange_n(&ops.top, &top, i + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
            }
            (void)pthread_setspecific(ops.key, slot);
            return slot;
        }
    }
    return NULL;
}

/* Returns this thread's slot if there is a recording; then leave() must be called. */
static struct slot *enter(void) {
    uint64_t recording = __atomic_load_n(&ops.recording, __ATOMIC_ACQUIRE);
    if (recording == 0) {
        return NULL;
    }
    if (own == NULL) {
        own = unserved == recording ? NULL : take_slot();
        if (own == NULL) {
            unserved = recording;
            return NULL;
        }
    }
    struct slot *slot = own;
    if (slot->inside) { /* a signal handler that runs ops */
        return NULL;
    }
    __atomic_store_n(&slot->inside, 1, __ATOMIC_SEQ_CST);
    recording = __atomic_load_n(&ops.recording, __ATOMIC_SEQ_CST);
    if (recording == 0) {
        leave(slot);
        return NULL;
    }
    if (slot->recording != recording) {
        begin_recording(slot, recording);
    }
    return slot;
}

/* ---- ops ---- */

/* Writes the open ops that have ended on other threads since the last sweep. */
static void sweep(struct slot *slot, uint64_t now) {
    uint32_t kept = 0;
    slot->elsewhere_seen = ops_elsewhere_count();
    for (uint32_t i = 0; i < slot->depth; i++) {
        const uint64_t end = ops_elsewhere_take(slot->frames[i].function, slot->frames[i].start);
        if (end != 0) {
            count(&ops.totals.ended_elsewhere);
            write_op(slot, &slot->frames[i], end, ARENA_OP_ENDED_ELSEWHERE, now);
        } else {
            slot->frames[kept++] = slot->frames[i];
        }
    }
    slot->depth = kept;
}

static uint64_t name_of(struct slot *slot, const void *function) {
    const char *name = ops.name(function);
    if (name == NULL) {
        name = "";
    }
    return intern(slot, ARENA_SPACE_OP_NAME, name, (uint32_t)strnlen(name, NAME_BYTES_MOST));
}

static void write_tensors(struct slot *slot, const struct ops_inputs *inputs, uint32_t number) {
    const uint64_t now = now_ns();
    for (uint32_t first = 0; first < inputs->tensor_count; first += 3) {
        const uint32_t left = inputs->tensor_count - first;
        struct ops_tensors_record record = {.thread = slot->thread,
                                            .number = number,
                                            .kind = ARENA_KIND_OP_TENSORS,
                                            .count = (uint8_t)(left < 3 ? left : 3),
                                            .first = (uint8_t)first};
        memcpy(record.tensors, &inputs->tensors[first], record.count * sizeof record.tensors[0]);
        ops_buffer_append(&slot->buffer, &record, now);
    }
}

static uint64_t inputs_of(struct slot *slot, const void *function, uint32_t number) {
    struct ops_inputs inputs;
    ops_describe_inputs(&ops.layout, function, &inputs);
    write_tensors(slot, &inputs, number);
    return intern(slot, ARENA_SPACE_OP_INPUTS, inputs.text, inputs.bytes);
}

static void write_comms(struct slot *slot, uint32_t number) {
    struct ops_comms comms;
    if (!ops_comms_describe(&ops.layout, &comms)) {
        return;
    }
    const struct ops_comms_record record = {.text = intern(slot, ARENA_SPACE_OP_COMMS, comms.text, comms.bytes),
                                            .sequence = comms.sequence,
                                            .thread = slot->thread,
                                            .number = number,
                                            .kind = ARENA_KIND_OP_COMMS,
                                            .transfer = comms.transfer};
    ops_buffer_append(&slot->buffer, &record, now_ns());
}

static void push(struct slot *slot, const void *function, uint8_t scope) {
    struct frame *frame = &slot->frames[slot->depth];
    frame->function = function;
    frame->scope = scope;
    frame->number = slot->number++;
    frame->sequence = -1;
    frame->forward_thread = 0;
    frame->inputs = 0;
    frame->name = name_of(slot, function);
    if (ops.layout_known) {
        memcpy(&frame->sequence, (const uint8_t *)function + ops.layout.function_sequence, sizeof frame->sequence);
    }
    if (frame->sequence >= 0) { /* without one there is no forward op */
        memcpy(&frame->forward_thread, (const uint8_t *)function + ops.layout.function_forward_thread,
               sizeof frame->forward_thread);
    }
    if (ops.inputs) {
        frame->inputs = inputs_of(slot, function, frame->number);
    }
    if (ops.layout_known && frame->name == ops.comms) {
        write_comms(slot, frame->number);
    }
    slot->depth++;
    frame->start = now_ns();
}

void ops_begin(const void *function, uint8_t scope) {
    struct slot *slot = enter();
    if (slot == NULL) {
        if (unserved != 0 && unserved == __atomic_load_n(&ops.recording, __ATOMIC_RELAXED)) {
            count(&ops.totals.unserved);
        }
        return;
    }
    if (slot->elsewhere_seen != ops_elsewhere_count()) {
        sweep(slot, now_ns());
    }
    if (slot->depth < DEPTH_MOST) {
        push(slot, function, scope);
    } else {
        slot->overflowed++;
        ops_buffer_drop(&slot->buffer);
        count(&ops.totals.too_deep);
    }
    leave(slot);
}

void ops_end(const void *function) {
    if (__atomic_load_n(&ops.recording, __ATOMIC_RELAXED) == 0) {
        return;
    }
    const uint64_t now = now_ns();
    struct slot *slot = enter();
    if (slot == NULL) {
        return;
    }
    uint32_t depth = slot->depth;
    while (depth > 0 && slot->frames[depth - 1].function != function) {
        depth--;
    }
    if (depth > 0) {
        if (slot->depth > depth) {
            abandon(slot, depth, false, now);
        }
        slot->depth--;
        write_op(slot, &slot->frames[slot->depth], now, 0, now);
        catch_up(slot);
    } else if (slot->overflowed > 0) {
        slot->overflowed--;
    } else {
        ops_elsewhere_add(function, now);
    }
    leave(slot);
}

/* ---- the agent's thread ---- */

int ops_threads_prepare(void) {
    if (ops.slots != NULL) {
        return 0;
    }
    const int number = pthread_key_create(&ops.key, thread_ends);
    if (number != 0) {
        return number;
    }
    void *memory = mmap(NULL, THREADS_MOST * sizeof(struct slot), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        (void)pthread_key_delete(ops.key);
        return errno;
    }
    ops.slots = memory;
    return 0;
}

void ops_threads_open(struct arena *arena, const struct kc_observer_layout *layout, bool inputs,
                      const char *(*name)(const void *), uint64_t (*thread_number)(void)) {
    ops.arena = arena;
    ops.layout_known = layout != NULL;
    if (layout != NULL) {
        ops.layout = *layout;
    }
    ops.inputs = inputs && layout != NULL;
    ops.comms = text_hash(OPS_COMMS_OP, sizeof OPS_COMMS_OP - 1, ARENA_SPACE_OP_NAME);
    ops.name = name;
    ops.thread_number = thread_number;
    memset(&ops.totals, 0, sizeof ops.totals);
    ops_elsewhere_reset();
    __atomic_store_n(&ops.recording, ++ops.recordings, __ATOMIC_SEQ_CST);
}

void ops_threads_close(void) { __atomic_store_n(&ops.recording, 0, __ATOMIC_SEQ_CST); }

bool ops_threads_inside(void) {
    const uint32_t top = __atomic_load_n(&ops.top, __ATOMIC_SEQ_CST);
    for (uint32_t i = 0; i < top; i++) {
        if (__atomic_load_n(&ops.slots[i].inside, __ATOMIC_SEQ_CST)) {
            return true;
        }
    }
    return false;
}

void ops_threads_collect(int64_t limit_ns, struct ops_totals *totals) {
    const int64_t deadline = clock_ns(CLOCK_MONOTONIC) + limit_ns;
    const uint32_t top = __atomic_load_n(&ops.top, __ATOMIC_SEQ_CST);
    for (uint32_t i = 0; i < top; i++) {
        struct slot *slot = &ops.slots[i];
        while (__atomic_load_n(&slot->inside, __ATOMIC_SEQ_CST) && clock_ns(CLOCK_MONOTONIC) < deadline) {
            sched_yield();
        }
        slot->stuck = __atomic_load_n(&slot->inside, __ATOMIC_SEQ_CST);
        ops.totals.stuck += slot->stuck;
    }
    /* Threads that are not stuck are outside, or find no recording: no other thread writes texts now. */
    for (uint32_t i = 0; i < top; i++) {
        struct slot *slot = &ops.slots[i];
        if (slot->stuck || slot->recording != ops.recordings) {
            continue;
        }
        (void)finish(slot, true);
        if (slot->left) {
            slot->left = 0;
            __atomic_store_n(&slot->taken, 0, __ATOMIC_RELEASE);
        }
    }
    __atomic_fetch_add(arena_word(ops.arena, ARENA_DROPPED), ops.totals.unserved, __ATOMIC_RELAXED);
    *totals = ops.totals;
}

void ops_threads_forked(void) {
    ops_threads_close();
    for (uint32_t i = 0; i < ops.top; i++) { /* those threads are not in this process */
        ops.slots[i].inside = 0;
        ops.slots[i].left = 0;
        ops.slots[i].taken = &ops.slots[i] == own;
    }
}
