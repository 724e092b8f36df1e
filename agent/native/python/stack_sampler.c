/* The exported functions of the stack sampler. stack_sampler.h describes their use.
 *
 * Theory of operation
 *   A thread without Python reads the interpreter's data about its threads from memory: interpreters, thread states,
 *   frames, code objects. It takes no lock of the interpreter, calls none of its functions and never has the GIL, so
 *   that a sample is taken when it is due and not when the program happens to release the GIL. It runs inside the
 *   program because there it needs no permission (a daemon would need ptrace, which Yama, containers and other users'
 *   processes deny), stops no thread, writes the same kind of arena as every other source, and can be checked on the
 *   spot: before a recording the agent compares the result of kc_sampler_look on its own thread with Python's.
 *
 *   read_memory.c     reads memory by a system call: a wrong address is an error, never a fault.
 *   frame_walk.c      finds threads and frames, and tells a stack that changed meanwhile.
 *   code_objects.c    reads code objects and texts.
 *   stack_names.c     gives numbers to code objects and stacks, and writes what they stand for.
 *   kernel_threads.c  the kernel's threads: CPU time, name, what they wait for.
 *   sampler_thread.c  the thread: at each tick one record for each Python thread, and for each other one that has run.
 *   sampling_rate.c   when the next tick is.
 *
 *   A thread that has had no CPU time since its last sample is still where it was: it costs one read of its clock.
 *
 *   Fork: nothing of this is mapped in the child (MADV_DONTFORK), the arena's descriptor is closed there. Exit: a
 *   handler ends the thread, which publishes what it has. If the process is killed, data published so far (every 250
 *   ms) stays in the arena.
 *
 * Threads: the exported functions run on the agent's, those that read the interpreter's memory with the GIL
 *   (sampler_binding.py); at_exit runs on the thread that exits.
 * Blocks: kc_sampler_stop, without the GIL, waits for the sampler's thread up to its limit; at_exit waits for it up
 *   to EXIT_LIMIT_NS. The others never do.
 */
#define _GNU_SOURCE
#include "python/stack_sampler.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/error_text.h"
#include "common/own_threads.h"
#include "python/sampler_thread.h"

#define NS_PER_MS 1000000LL
#define BUFFERS_LEAST 4u
#define BUFFERS_MOST 64u
#define EXIT_LIMIT_NS (20 * NS_PER_MS)
#define STACK_BYTES (256u << 10)
#define INTERPRETERS_MOST 256u
#define THREADS_MOST 8192u
#define FILE_BYTES_MOST 4096u

static struct {
    bool process_hooks;
    bool opened;
    struct kc_sampler_layout layout;
    struct thread_ids ids;
    struct walker_of_stacks looker; /* of the agent's thread */
    struct sampler *sampler;
    struct sampler *stuck; /* its thread has not ended in time */
    struct arena arena;    /* a copy of that of `sampler`, which a forked child does not have */
    pthread_t thread;
    _Atomic bool running;
    _Atomic bool exiting;
} self;

/* ---- fork and exit ---- */

static void in_forked_child(void) {
    if (self.sampler != NULL) {
        arena_close(&self.arena); /* otherwise the daemon would not see the end of this process */
    }
    memory_close(&self.looker.memory); /* it is the parent's memory */
    self.opened = false;
    self.running = false;
    self.sampler = self.stuck = NULL;
    memset(&self.ids, 0, sizeof self.ids);
}

/* Returns true once the thread has finished. */
static bool end_thread(int64_t limit_ns) {
    struct sampler *sampler = self.sampler;
    __atomic_store_n(&sampler->command, SAMPLER_FINISH, __ATOMIC_SEQ_CST);
    wake_post(&sampler->work);
    return wake_await(&sampler->done, &sampler->ended, 1, limit_ns);
}

static void at_exit(void) {
    self.exiting = true; /* before `running` is read: kc_sampler_close does the opposite */
    if (self.running && end_thread(EXIT_LIMIT_NS) && atomic_exchange(&self.running, false)) {
        pthread_join(self.thread, NULL);
    }
}

static void hook_process(void) {
    if (!self.process_hooks) {
        self.process_hooks = true;
        (void)pthread_atfork(NULL, NULL, in_forked_child);
        (void)atexit(at_exit);
    }
}

/* ---- looking ---- */

uint32_t kc_sampler_abi(void) { return KC_SAMPLER_ABI; }

int kc_sampler_open(const struct kc_sampler_layout *layout, char *error, size_t error_bytes) {
    hook_process();
    memory_close(&self.looker.memory);
    self.opened = false;
    if (!walk_fits(layout)) {
        return refuse(KC_SAMPLER_UNREAD, error, error_bytes, "its offsets lead out of its objects");
    }
    if (!memory_open(&self.looker.memory)) {
        snprintf(error, error_bytes, "this process may not read its own memory (%s)", strerror(errno));
        return KC_SAMPLER_UNREAD;
    }
    ids_learn(&self.ids, &self.looker.memory);
    self.layout = *layout;
    self.looker.layout = &self.layout;
    self.opened = true;
    return 0;
}

/* Calls `visit` for every thread state until it returns true. */
static bool any_thread(bool (*visit)(const struct python_thread *, uint64_t, void *), void *argument) {
    struct walker_of_stacks *walker = &self.looker;
    uint64_t interpreter = walk_interpreters(walker);
    struct python_thread thread;
    for (uint32_t i = 0; i < INTERPRETERS_MOST && interpreter != 0; i++) {
        uint64_t address = walk_threads(walker, interpreter);
        for (uint32_t j = 0; j < THREADS_MOST && address != 0; j++) {
            if (!walk_thread(walker, address, interpreter, &thread)) {
                break;
            }
            if (visit(&thread, interpreter, argument)) {
                return true;
            }
            address = thread.next;
        }
        interpreter = walk_next_interpreter(walker, interpreter);
    }
    return false;
}

struct own_thread {
    struct python_thread thread;
    uint64_t interpreter;
};

static bool is_own(const struct python_thread *thread, uint64_t interpreter, void *argument) {
    struct own_thread *own = argument;
    if (thread->id != (uint64_t)pthread_self()) {
        return false;
    }
    *own = (struct own_thread){*thread, interpreter};
    return true;
}

/* Whether the kernel's id of the thread can be found in any way. */
static bool knows_tid(const struct python_thread *thread) {
    const uint32_t tid = (uint32_t)syscall(SYS_gettid);
    return thread->native_id == tid || ids_tid(&self.ids, &self.looker.memory, thread->id) == tid;
}

int kc_sampler_look(struct kc_sampler_frame *frames, uint32_t most, uint32_t *holds_gil, char *error,
                    size_t error_bytes) {
    struct walker_of_stacks *walker = &self.looker;
    struct code_identity codes[STACK_DEPTH_MOST];
    struct own_thread own;
    uint64_t outermost = 0;
    *holds_gil = 0;
    if (!self.opened) {
        return refuse(KC_ORDER, error, error_bytes, "not open");
    }
    if (!any_thread(is_own, &own)) {
        return refuse(KC_SAMPLER_UNREAD, error, error_bytes, "no interpreter has the thread that asks");
    }
    if (!knows_tid(&own.thread)) {
        return refuse(KC_SAMPLER_UNREAD, error, error_bytes, "the system's id of a thread is not where it should be");
    }
    /* A partial one is complete here, since this thread stands still; the caller compares it anyway. */
    const enum walk walked = walk_stack(walker, &own.thread, &outermost);
    if ((walked != WALK_WHOLE && walked != WALK_PARTIAL) || !walk_codes(walker, &walker->stack, codes)) {
        return refuse(KC_SAMPLER_UNREAD, error, error_bytes,
                      "the stack of the thread that asks is not where it should be");
    }
    *holds_gil = walk_gil_holder(walker, walk_gil(walker, own.interpreter)) == own.thread.id;
    const uint32_t depth = walker->stack.depth < most ? walker->stack.depth : most;
    for (uint32_t i = 0; i < depth; i++) {
        frames[i] = (struct kc_sampler_frame){
            .code = walker->stack.frames[i].code,
            .instruction = walk_instruction(walker->layout, &walker->stack.frames[i], &codes[i])};
    }
    return (int)depth;
}

int kc_sampler_read_text(uint64_t address, char *text, uint32_t bytes) {
    return self.opened ? walk_text(&self.looker, address, text, bytes) : KC_ORDER;
}

int kc_sampler_read_names(uint64_t address, char *texts, uint32_t bytes) {
    return self.opened ? walk_names(&self.looker, address, texts, bytes) : KC_ORDER;
}

struct wanted {
    uint64_t code; /* 0: any code of the file */
    const char *file;
};

static bool is_of_file(uint64_t text, const char *file) {
    char found[FILE_BYTES_MOST];
    const int32_t length = walk_text(&self.looker, text, found, sizeof found);
    return length >= 0 && (size_t)length == strlen(file) && memcmp(found, file, (size_t)length) == 0;
}

static bool is_inside(const struct python_thread *thread, uint64_t interpreter, void *argument) {
    const struct wanted *wanted = argument;
    const struct stack *stack = &self.looker.stack;
    struct code_identity codes[STACK_DEPTH_MOST];
    uint64_t outermost = 0;
    (void)interpreter;
    const enum walk walked = walk_stack(&self.looker, thread, &outermost);
    if (walked == WALK_EMPTY) {
        return false;
    }
    if (walked == WALK_TORN || !walk_codes(&self.looker, stack, codes)) {
        return true; /* it may be */
    }
    uint64_t looked_at = 0;
    for (uint32_t i = 0; i < stack->depth; i++) {
        if (codes[i].address == wanted->code) {
            return true;
        }
        if (wanted->code == 0 && codes[i].filename != looked_at && is_of_file(codes[i].filename, wanted->file)) {
            return true;
        }
        looked_at = codes[i].filename;
    }
    return false;
}

int kc_sampler_runs(uint64_t code) {
    struct wanted wanted = {.code = code};
    return self.opened ? any_thread(is_inside, &wanted) : KC_ORDER;
}

int kc_sampler_change_item(const char *file, const struct kc_sampler_item *item) {
    struct wanted wanted = {.file = file};
    if (!self.opened || any_thread(is_inside, &wanted) != 0) {
        return 0;
    }
    const int failed = item->new_value == NULL ? item->remove(item->object, item->key)
                                               : item->set(item->object, item->key, item->new_value);
    return failed != 0 ? -1 : 1;
}

/* ---- recording ---- */

static uint32_t buffer_count(const struct kc_sampler_config *config) {
    const uint64_t count = config->buffer_limit_bytes / config->buffer_bytes;
    return count < BUFFERS_LEAST ? BUFFERS_LEAST : count > BUFFERS_MOST ? BUFFERS_MOST : (uint32_t)count;
}

static void destroy(struct sampler *sampler) {
    arena_destroy(&sampler->arena);
    sampler_destroy(sampler);
}

static bool free_stuck(void) {
    if (self.stuck != NULL) {
        if (!__atomic_load_n(&self.stuck->ended, __ATOMIC_SEQ_CST)) {
            return false;
        }
        destroy(self.stuck);
        self.stuck = NULL;
    }
    return true;
}

int kc_sampler_prepare(const struct kc_sampler_config *config, char *error, size_t error_bytes) {
    if (!self.opened || self.sampler != NULL) {
        return refuse(KC_ORDER, error, error_bytes, "not open, or a recording of stacks is still open");
    }
    if (!free_stuck()) {
        return refuse(KC_ORDER, error, error_bytes, "the sampler of the previous recording has not ended yet");
    }
    const char *step = "mmap";
    struct sampler *sampler = sampler_create(&self.layout, &self.ids, config);
    if (sampler == NULL) {
        return refuse_system(error, error_bytes, step, errno);
    }
    const int number = arena_create(&sampler->arena, buffer_count(config), config->buffer_bytes, config->strings_bytes,
                                    &step);
    if (number != 0) {
        sampler_destroy(sampler);
        return refuse_system(error, error_bytes, step, number);
    }
    self.arena = sampler->arena;
    self.sampler = sampler;
    return self.arena.fd;
}

static int create_thread(void) {
    pthread_attr_t attributes;
    sigset_t before;
    (void)pthread_attr_init(&attributes);
    block_signals(&before);
    (void)pthread_attr_setstacksize(&attributes, STACK_BYTES);
    int number = pthread_create(&self.thread, &attributes, sampler_run, self.sampler);
    if (number == EINVAL) { /* the thread-local variables of the program's libraries need more */
        number = pthread_create(&self.thread, NULL, sampler_run, self.sampler);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    (void)pthread_attr_destroy(&attributes);
    return number;
}

int kc_sampler_start(char *error, size_t error_bytes) {
    if (self.sampler == NULL || self.running || self.sampler->ended) {
        return refuse(KC_ORDER, error, error_bytes, "not prepared");
    }
    const int number = create_thread();
    if (number != 0) {
        return refuse_system(error, error_bytes, "pthread_create", number);
    }
    self.running = true;
    return 0;
}

int kc_sampler_name(uint32_t tid, const char *name, uint32_t length) {
    if (self.sampler == NULL) {
        return KC_ORDER;
    }
    if (!self.running && !self.sampler->ended) { /* no thread yet: it need not record the kernel's name */
        struct task *task = tasks_find(&self.sampler->tasks, tid);
        if (task != NULL) {
            task->named = true;
        }
    }
    return sampler_name(self.sampler, tid, name, length) ? 0 : KC_SYSTEM;
}

int kc_sampler_counts(struct kc_counts *counts) {
    memset(counts, 0, sizeof *counts);
    if (self.sampler == NULL) {
        return KC_ORDER;
    }
    counts->records = arena_load(&self.sampler->arena, ARENA_RECORDS);
    counts->bytes = arena_load(&self.sampler->arena, ARENA_VALID_BYTES);
    counts->dropped = arena_load(&self.sampler->arena, ARENA_DROPPED);
    return 0;
}

uint64_t kc_sampler_ticks(void) {
    return self.sampler == NULL ? 0 : __atomic_load_n(&self.sampler->ticks, __ATOMIC_ACQUIRE);
}

int kc_sampler_stop(uint32_t limit_ms, struct kc_sampler_stop_result *result) {
    memset(result, 0, sizeof *result);
    if (self.sampler == NULL) {
        return KC_ORDER;
    }
    bool ended = true;
    if (self.running) {
        ended = end_thread(limit_ms * NS_PER_MS);
        if (atomic_exchange(&self.running, false)) { /* otherwise an exiting process has joined it */
            (void)(ended ? pthread_join(self.thread, NULL) : pthread_detach(self.thread));
        }
    }
    if (ended) {
        *result = self.sampler->result;
    }
    result->timed_out = !ended;
    (void)kc_sampler_counts(&result->counts);
    return 0;
}

int kc_sampler_close(void) {
    struct kc_sampler_stop_result result;
    if (self.sampler == NULL) {
        return 0;
    }
    (void)kc_sampler_stop(0, &result);
    if (self.exiting) {
        return 0; /* the exit handler may be using it */
    }
    struct sampler *sampler = self.sampler;
    self.sampler = NULL;
    if (result.timed_out) {
        arena_close(&sampler->arena);
        self.stuck = sampler;
    } else {
        destroy(sampler);
    }
    return 0;
}
