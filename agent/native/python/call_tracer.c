/* See call_tracer.h.
 *
 * Theory of operation
 *   The interpreter calls `on_event` for each call and return on a thread that has it as its profile function, with the
 *   GIL held: so there is one writer at a time, one buffer, no lock. A record is 16 bytes: time, thread, name. The
 *   callee is a number there (callable_names.c).
 *
 *   The function is set thread by thread, on threads that have none: a profile function of the program stays. The word
 *   of PyThreadState that holds it is found by setting it on the calling thread. Frames already on a thread's stack are
 *   recorded as if they were called then. Setting it may run the program's audit hooks, during which threads may end:
 *   so the list of threads is restarted after each.
 *
 *   With modules_only the same function skips everything except calls of torch.nn.Module.__call__ and their returns.
 *
 *   Recording ends for good when no buffer is free: with a gap, returns would be matched with the wrong calls.
 *
 * Threads: on_event runs on every recorded thread of the program, with the GIL; the exported functions marked (GIL)
 *   on the agent's with the GIL, the others without.
 * Blocks: on_event never waits: no lock, and no system call but gettid at a thread's first event. Setting the
 *   function may run the program's audit hooks.
 */
#define _GNU_SOURCE
#include "python/call_tracer.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "common/arena.h"
#include "python/callable_names.h"
#include "common/error_text.h"

#define PUBLISH_PERIOD_NS 250000000u
#define LEFT_OUT_MOST 8u
#define REFUSED_MOST 64u
#define STACK_MOST 1024u
#define THREADS_MOST 2048u
#define STATE_WORDS 32u /* of PyThreadState, searched for the profile function; all versions have more */
#define NO_BUFFER UINT32_MAX

enum event { CALL = 0, RETURN = 3, C_CALL = 4, C_EXCEPTION = 5, C_RETURN = 6 };

struct record {
    uint64_t time;
    uint32_t thread;
    uint32_t name;
};
_Static_assert(sizeof(struct record) == ARENA_PYTHON_CALL_BYTES, "records.PYTHON_CALL");

/* A thread with at least one event. */
struct thread {
    void *state; /* PyThreadState: a library's thread has a new one each time it calls Python */
    uint32_t id;
    bool cut; /* it has another profile function now, or the state has ended */
};

enum phase { CLOSED, OPENED, PREPARED, RECORDING, STOPPED };

static struct {
    enum phase phase;
    bool writing; /* while recording, and there was a buffer */
    bool modules_only;
    bool process_hooks;
    struct arena *arena;
    uint32_t buffer;
    uint32_t used;
    uint64_t lent_ns;
    size_t profile_word; /* of PyThreadState */
    uint64_t recording;  /* number of the current one, from 1 on */
    uint64_t set_ns;     /* when the function was last set on a thread */
    struct thread threads[THREADS_MOST];
    uint32_t threads_used;
    void *left_out[LEFT_OUT_MOST];
    uint32_t left_out_count;
    void *refused[REFUSED_MOST];
    uint32_t refused_count;
    struct kc_tracer_result result;
} self;

static struct thread crowd; /* threads beyond THREADS_MOST, which are not recorded */
static _Thread_local struct thread *own;
static _Thread_local uint64_t own_recording; /* recording for which `own` is valid; in later ones that row is another
                                              * thread's */

static uint64_t now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---- buffers ---- */

static void publish(void) {
    const uint32_t index = self.buffer;
    if (index == NO_BUFFER) {
        return;
    }
    self.buffer = NO_BUFFER;
    *arena_buffer_word(self.arena, index, ARENA_BUFFER_VALID_BYTES) = self.used;
    *arena_buffer_word(self.arena, index, ARENA_BUFFER_RECORDS) = self.used / sizeof(struct record);
    *arena_buffer_word(self.arena, index, ARENA_BUFFER_SEQUENCE) = arena_load(self.arena, ARENA_SEQUENCE);
    arena_add(self.arena, ARENA_SEQUENCE, 1);
    arena_add(self.arena, ARENA_RECORDS, self.used / sizeof(struct record));
    arena_add(self.arena, ARENA_VALID_BYTES, self.used);
    arena_set_state(self.arena, index, ARENA_READY);
}

static bool lend(uint64_t now) {
    for (uint32_t i = 0; i < self.arena->fixed.buffer_count; i++) {
        if (arena_load_state(self.arena, i) == ARENA_FREE) {
            arena_set_state(self.arena, i, ARENA_LOANED);
            self.buffer = i;
            self.used = 0;
            self.lent_ns = now;
            return true;
        }
    }
    self.writing = false;
    self.result.full_ns = now;
    arena_add(self.arena, ARENA_DROPPED, 1);
    return false;
}

static void write_record(uint64_t now, uint32_t thread, uint32_t name) {
    if (self.buffer == NO_BUFFER && !lend(now)) {
        return;
    }
    const struct record record = {.time = now, .thread = thread, .name = name};
    memcpy(arena_buffer(self.arena, self.buffer) + self.used, &record, sizeof record);
    self.used += sizeof record;
    if (self.used + sizeof record > self.arena->fixed.buffer_bytes || now - self.lent_ns > PUBLISH_PERIOD_NS) {
        publish();
    }
}

/* ---- the profile function ---- */

/* Records the frames on this thread's stack, from the frame outwards, as if they were called when the function was
 * set. */
static void record_stack(void *frame) {
    uint32_t names[STACK_MOST];
    uint32_t depth = 0;
    python.keep(frame);
    while (frame != NULL) {
        if (depth < STACK_MOST && (!self.modules_only || python_calls_module(frame))) {
            names[depth++] = python_name_of_frame(frame);
        }
        void *back = python.frame_back(frame);
        python.let_go(frame);
        frame = back;
    }
    while (depth > 0) {
        write_record(self.set_ns, own->id, names[--depth]);
    }
}

/* Handles the first event of this thread, or the first after it had another profile function or got a new state. */
static void begin_thread(void *frame, bool frame_is_new) {
    if (own_recording != self.recording) {
        own = self.threads_used < THREADS_MOST ? &self.threads[self.threads_used++] : &crowd;
        *own = (struct thread){.id = (uint32_t)syscall(SYS_gettid)};
        own_recording = self.recording;
    }
    own->cut = false;
    if (own == &crowd) {
        self.result.threads--; /* the function was set on it */
        self.result.crowded++;
        return;
    }
    void *const state = python.this_thread();
    for (uint32_t i = 0; i < self.threads_used; i++) {
        self.threads[i].state = self.threads[i].state == state ? NULL : self.threads[i].state; /* it has ended */
    }
    own->state = state;
    void *first = frame_is_new ? python.frame_back(frame) : frame;
    if (first != NULL) {
        record_stack(first);
    }
    if (frame_is_new) {
        python.let_go(first);
    }
}

static int on_event(void *unused, void *frame, int what, void *argument) {
    (void)unused;
    if (!self.writing) {
        return 0;
    }
    if (own_recording != self.recording || own->cut) {
        begin_thread(frame, what == CALL);
    }
    if (own == &crowd || (self.modules_only && ((what != CALL && what != RETURN) || !python_calls_module(frame)))) {
        return 0;
    }
    switch ((enum event)what) {
    case CALL: write_record(now_ns(), own->id, python_name_of_frame(frame)); break;
    case C_CALL: write_record(now_ns(), own->id, python_name_of_c_function(argument)); break;
    case RETURN: write_record(now_ns(), own->id, ARENA_CALL_RETURN); break;
    case C_EXCEPTION:
    case C_RETURN: write_record(now_ns(), own->id, ARENA_CALL_C_RETURN); break;
    default: break;
    }
    return 0;
}

/* ---- threads ---- */

static profile_function profile_of(void *thread) {
    profile_function found;
    memcpy(&found, (const char *)thread + self.profile_word, sizeof found);
    return found;
}

static bool is_among(void *thread, void *const *threads, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        if (threads[i] == thread) {
            return true;
        }
    }
    return false;
}

static void *first_thread(void) { return python.first_thread(python.main_interpreter()); }

static void *next_with(profile_function function) {
    for (void *thread = first_thread(); thread != NULL; thread = python.next_thread(thread)) {
        if (profile_of(thread) == function && !is_among(thread, self.left_out, self.left_out_count) &&
            !is_among(thread, self.refused, self.refused_count)) {
            return thread;
        }
    }
    return NULL;
}

/* Changes `from` to `to` on every thread that has `from`. The program's audit hook may refuse. */
static uint64_t change_all(profile_function from, profile_function to) {
    uint64_t changed = 0;
    void *thread;
    while (self.refused_count < REFUSED_MOST && (thread = next_with(from)) != NULL) {
        if (python.set_profile(thread, to, NULL) == 0 && profile_of(thread) == to) {
            changed++;
        } else {
            python.clear_error();
            self.refused[self.refused_count++] = thread;
        }
    }
    return changed;
}

/* Other interpreters may have their own GIL, so we cannot touch their threads. The main one was created first and is
 * the last in the list, so no other, which might end, needs to be read. */
static void look_for_others(void) { self.result.elsewhere |= python.newest_interpreter() != python.main_interpreter(); }

static void set_all(void) {
    look_for_others();
    const uint64_t set = change_all(NULL, on_event);
    if (set > 0) {
        self.set_ns = now_ns();
        self.result.threads += set;
    }
}

/* Finds the word of PyThreadState by setting the function on this thread, which is not recorded. */
static bool find_profile_word(void *thread) {
    profile_function words[STATE_WORDS];
    const profile_function wanted = on_event;
    if (python.set_profile(thread, on_event, NULL) != 0) {
        python.clear_error();
        return false;
    }
    memcpy(words, thread, sizeof words);
    for (size_t i = 0; i < STATE_WORDS; i++) {
        if (words[i] == wanted) {
            self.profile_word = i * sizeof words[0];
            return true;
        }
    }
    return false;
}

static void unset_this(void *thread) {
    if (python.set_profile(thread, NULL, NULL) != 0) {
        python.clear_error();
    }
}

/* ---- fork and exit ---- */

static void in_forked_child(void) {
    self.writing = false;
    if (self.arena != NULL) {
        arena_close(self.arena); /* otherwise the daemon would not see the end of this process */
        free(self.arena);
        self.arena = NULL;
    }
    python_names_forked();
    self.phase = CLOSED;
}

static void at_exit(void) { self.writing = false; }

static void hook_process(void) {
    if (!self.process_hooks) {
        self.process_hooks = true;
        (void)pthread_atfork(NULL, NULL, in_forked_child);
        (void)atexit(at_exit);
    }
}

/* ---- exported ---- */

uint32_t kc_tracer_abi(void) { return KC_TRACER_ABI; }

int kc_tracer_open(char *error, size_t error_bytes) {
    if (self.phase > OPENED) {
        return refuse(KC_ORDER, error, error_bytes, "a recording of Python's calls is still open");
    }
    const char *missing = python_find();
    if (missing != NULL) {
        snprintf(error, error_bytes, "this Python has no %s", missing);
        return KC_LIBRARY;
    }
    self.phase = OPENED;
    return 0;
}

int kc_tracer_prepare(const struct kc_tracer_config *config, char *error, size_t error_bytes) {
    if (self.phase != OPENED) {
        return refuse(KC_ORDER, error, error_bytes, "not open, or a recording of Python's calls is still open");
    }
    if (!python_names_prepare()) {
        return refuse(KC_SYSTEM, error, error_bytes, "no memory for the names of functions");
    }
    const char *step = "malloc";
    struct arena *arena = malloc(sizeof *arena);
    if (arena == NULL) {
        return refuse(KC_SYSTEM, error, error_bytes, "out of memory");
    }
    const uint64_t wanted = config->buffer_limit_bytes / config->buffer_bytes;
    const int failed = arena_create(arena, wanted < 2 ? 2 : (uint32_t)wanted, config->buffer_bytes,
                                    config->strings_bytes, &step);
    if (failed != 0) {
        free(arena);
        return refuse_system(error, error_bytes, step, failed);
    }
    arena_populate(arena, config->prefault_bytes);
    hook_process();
    self.arena = arena;
    self.modules_only = config->modules_only;
    self.buffer = NO_BUFFER;
    self.left_out_count = 0;
    self.refused_count = 0;
    self.threads_used = 0;
    memset(&self.result, 0, sizeof self.result);
    self.phase = PREPARED;
    return arena->fd;
}

int kc_tracer_leave_out(void) {
    if (self.left_out_count < LEFT_OUT_MOST) {
        self.left_out[self.left_out_count++] = python.this_thread();
    }
    return 0;
}

int kc_tracer_start(void *module_call, char *error, size_t error_bytes) {
    void *const thread = python.this_thread();
    if (self.phase != PREPARED) {
        return refuse(KC_ORDER, error, error_bytes, "not prepared");
    }
    (void)kc_tracer_leave_out();
    if (!find_profile_word(thread)) {
        unset_this(thread);
        return refuse(KC_LIBRARY, error, error_bytes,
                      "this Python does not take a profile function as it is known, or an audit hook forbids it");
    }
    self.recording++;
    python_names_begin(self.arena, module_call);
    self.set_ns = now_ns();
    self.phase = RECORDING;
    self.writing = true;
    set_all();
    unset_this(thread); /* last: the interpreter converts all code when the first thread has a function, and back at the
                         * last */
    return 0;
}

int kc_tracer_look(void) {
    if (self.phase != RECORDING || !self.writing) {
        return KC_ORDER;
    }
    for (uint32_t i = 0; i < self.threads_used; i++) {
        struct thread *known = &self.threads[i];
        void *thread = first_thread();
        while (thread != NULL && thread != known->state) {
            thread = python.next_thread(thread);
        }
        if (thread == NULL) {
            known->cut = true; /* nothing is open in a state that has ended, but its thread may go on with another */
        } else if (!known->cut && profile_of(thread) != on_event) {
            known->cut = true;
            write_record(now_ns(), known->id, ARENA_CALL_CUT);
        }
    }
    set_all();
    return 0;
}

int kc_tracer_counts(struct kc_counts *counts) {
    memset(counts, 0, sizeof *counts);
    if (self.phase < PREPARED) {
        return KC_ORDER;
    }
    counts->records = arena_load(self.arena, ARENA_RECORDS);
    counts->bytes = arena_load(self.arena, ARENA_VALID_BYTES);
    counts->dropped = arena_load(self.arena, ARENA_DROPPED);
    return 0;
}

int kc_tracer_stop(struct kc_tracer_result *result) {
    memset(result, 0, sizeof *result);
    if (self.phase != RECORDING) {
        return KC_ORDER;
    }
    self.writing = false;
    publish();
    self.refused_count = 0;
    (void)change_all(on_event, NULL);
    for (void *thread = first_thread(); thread != NULL; thread = python.next_thread(thread)) {
        self.result.others += profile_of(thread) != NULL;
    }
    self.result.others += self.refused_count;
    self.result.names_lost = python_names_end();
    arena_store(self.arena, ARENA_CLOSED, 1);
    self.phase = STOPPED;
    (void)kc_tracer_counts(&self.result.counts);
    *result = self.result;
    return 0;
}

int kc_tracer_close(void) {
    if (self.phase < PREPARED || self.phase == RECORDING) {
        return 0;
    }
    arena_destroy(self.arena);
    free(self.arena);
    self.arena = NULL;
    self.phase = OPENED;
    return 0;
}

int kc_tracer_forked(void) {
    void *const thread = python.this_thread();
    if (self.profile_word != 0 && profile_of(thread) == on_event) {
        unset_this(thread);
    }
    return 0;
}
