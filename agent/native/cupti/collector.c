/* The collector's exported functions. collector.h says how they are used.
 *
 * Theory of operation
 *   Three parties meet in one arena: CUPTI's threads (buffer_pool.c), the collector's thread (collector_thread.c,
 *   parse_buffers.c), and the daemon, which copies READY buffers from its own mapping and sets them FREE.
 *
 *   Fork: the arena is not mapped in the child (MADV_DONTFORK), the descriptor is closed there and every
 *   function refuses. Exit: a handler lets the thread publish what has been returned and end, before the
 *   vendor's own exit handlers (registered earlier, hence run later) take CUPTI down.
 *
 * Threads: the exported functions run on the agent's thread, without the GIL; give_way on a thread of the program
 *   that is about to use CUPTI, at_exit on the one that exits.
 * Blocks: each waits for its turn and inside CUPTI; kc_stop, kc_detach, give_way and at_exit wait for their limits at
 *   most. No vendor callback is in this file.
 */
#define _GNU_SOURCE
#include "cupti/collector.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/arena.h"
#include "cupti/detach_safety.h"
#include "cupti/call_filter.h"
#include "cupti/clock_samples.h"
#include "cupti/cupti_api.h"
#include "cupti/cupti_gate.h"
#include "cupti/detach.h"
#include "cupti/activity_kinds.h"
#include "cupti/buffer_callbacks.h"
#include "cupti/other_users.h"
#include "cupti/buffer_pool.h"
#include "cupti/call_records.h"
#include "common/error_text.h"
#include "cupti/retired_arenas.h"
#include "cupti/subscription.h"
#include "cupti/collector_turn.h"
#include "cupti/parse_buffers.h"
#include "cupti/collector_thread.h"

#define NS_PER_MS 1000000LL
#define BUFFERS_LEAST 2u
#define BUFFERS_MOST 65536u
#define EXIT_LIMIT_NS 1000000000LL
#define GIVE_WAY_LIMIT_NS 200000000LL /* for our turn, and again for the last flush: the program waits */

enum phase { CLOSED, PREPARED, RECORDING, STOPPED };

static struct {
    struct cupti_api api;
    bool opened;
    bool process_hooks; /* fork and exit handlers are registered */
    uint32_t dead;      /* forked child */
    _Atomic bool exiting;
    _Atomic enum phase phase;
    struct kc_config config;
    struct arena *arena;
    struct calls calls;
    struct walker walker;
    struct kinds kinds;
    struct worker worker;
    bool abandoned;     /* the thread did not end in time */
    bool close_pending; /* kc_close came before it did */
    bool detached;
    bool graphs_watched; /* the subscriber tells of their launches */
    bool gave_way;       /* to somebody else who uses CUPTI, and has it now */
    struct kc_stop_result stopped;
} self;

/* ---- fork and exit ---- */

static void in_forked_child(void) {
    __atomic_store_n(&self.dead, 1, __ATOMIC_SEQ_CST);
    pool_kill();
    gate_kill();
    turn_kill();
    if (self.arena != NULL) {
        arena_close(self.arena); /* else the daemon would see no end of this process */
    }
}

/* The turn is kept: from here on nobody comes into CUPTI through us, whose exit handlers take it down next. */
static void at_exit(void) {
    if (self.dead) {
        return;
    }
    (void)turn_begin_within(EXIT_LIMIT_NS, detach_expire);
    self.exiting = true;
    if (self.worker.started && worker_end(&self.worker, WORKER_EXITS, EXIT_LIMIT_NS)) {
        worker_leave(&self.worker, true);
    }
}

static void hook_process(void) {
    if (!self.process_hooks) {
        self.process_hooks = true;
        (void)pthread_atfork(NULL, NULL, in_forked_child);
        (void)atexit(at_exit);
    }
}

/* ---- the end of a recording ---- */

static void stop_recording(int64_t limit_ns) {
    struct kc_stop_result *result = &self.stopped;
    memset(result, 0, sizeof *result);
    records_close();
    kinds_disable(&self.kinds, &self.api);
    if (self.kinds.count > 0) {
        attachment_recording_ends(self.graphs_watched && subscription_held());
    }
    (void)subscription_follow_all(&self.api, false);
    self.phase = STOPPED;
    self.abandoned = !worker_end(&self.worker, WORKER_FINISHES, limit_ns);
    worker_leave(&self.worker, !self.abandoned);
    result->timed_out = self.abandoned;
    result->withheld = pool_usage(self.arena).loaned;
    (void)kc_counts(&result->counts);
    if (!self.abandoned && result->withheld == 0) {
        listener_restore(&self.api);
    }
    if (!self.abandoned) {
        result->cpu_ns = self.worker.cpu_ns;
        result->names_lost = self.walker.names_lost;
        result->irregular_records = self.walker.irregular_records;
        result->flushes = self.worker.flushes;
        result->flush_result = self.worker.flush_result;
    }
    result->calls_unnamed = self.calls.unnamed;
}

/* On the thread of somebody who is about to use CUPTI. */
static void give_way(void) {
    if (!turn_begin_within(GIVE_WAY_LIMIT_NS, detach_expire)) {
        return;
    }
    if (self.phase == RECORDING) {
        stop_recording(GIVE_WAY_LIMIT_NS);
    }
    self.gave_way = self.phase != CLOSED;
    records_close();
    subscription_close(&self.api);
    turn_end();
}

/* ---- exported ---- */

static int refuse_cupti(cupti_result result, char *error, size_t error_bytes) {
    kc_result_text(result, error, error_bytes);
    return KC_CUPTI;
}

uint32_t kc_abi(void) { return KC_ABI; }

int kc_open(const char *path, uint32_t *version, char *error, size_t error_bytes) {
    if (self.dead) {
        return refuse(KC_FORKED, error, error_bytes, "CUPTI does not work in a forked child process");
    }
    if (self.exiting) {
        return refuse(KC_ORDER, error, error_bytes, "the process is exiting");
    }
    if (self.close_pending) {
        (void)kc_close();
    }
    if (self.phase != CLOSED) {
        return refuse(KC_ORDER, error, error_bytes,
                      self.close_pending ? "CUPTI has not ended the previous recording yet: try again later"
                                         : "a recording is still open");
    }
    self.opened = false;
    if (cupti_api_open(&self.api, path, error, error_bytes) != 0) {
        return KC_LIBRARY;
    }
    const cupti_result result = self.api.get_version(version);
    if (result != CUPTI_SUCCESS) {
        snprintf(error, error_bytes, "cuptiGetVersion of %s failed with %d", path, result);
        return KC_CUPTI;
    }
    self.opened = true;
    return 0;
}

static uint32_t buffer_count(const struct kc_config *config) {
    const uint64_t count = config->buffer_limit_bytes / config->buffer_bytes;
    return count < BUFFERS_LEAST ? BUFFERS_LEAST : count > BUFFERS_MOST ? BUFFERS_MOST : (uint32_t)count;
}

static int make_arena(char *error, size_t error_bytes) {
    const char *step = "malloc";
    struct arena *arena = malloc(sizeof *arena);
    if (arena == NULL) {
        return refuse(KC_SYSTEM, error, error_bytes, "out of memory");
    }
    const int number = arena_create(arena, buffer_count(&self.config), self.config.buffer_bytes,
                                    self.config.strings_bytes, &step);
    if (number != 0) {
        free(arena);
        return refuse_system(error, error_bytes, step, number);
    }
    if (!walker_init(&self.walker, &self.api, arena, self.config.kernel_name_offset) ||
        !records_init(arena->fixed.buffer_count)) {
        records_free();
        walker_free(&self.walker);
        arena_destroy(arena);
        free(arena);
        return refuse(KC_SYSTEM, error, error_bytes, "out of memory");
    }
    arena_populate(arena, self.config.prefault_bytes);
    self.arena = arena;
    self.worker.api = &self.api;
    self.worker.arena = arena;
    self.worker.walker = &self.walker;
    self.worker.flush_period_ns = self.config.flush_period_ms * NS_PER_MS;
    return 0;
}

int kc_prepare(const struct kc_config *config, char *error, size_t error_bytes) {
    if (self.dead || self.exiting || !self.opened || self.phase != CLOSED) {
        return refuse(self.dead ? KC_FORKED : KC_ORDER, error, error_bytes, "not open, or a recording is still open");
    }
    const int number = config->may_decline ? 0 : pool_prepare_spill();
    if (number != 0) {
        return refuse_system(error, error_bytes, "mmap", number);
    }
    self.config = *config;
    const int code = make_arena(error, error_bytes);
    if (code != 0) {
        return code;
    }
    memset(&self.calls, 0, sizeof self.calls);
    self.kinds.count = 0;
    self.worker.flushes = 0;
    self.worker.cpu_ns = 0;
    self.detached = false;
    self.worker.flush_result = CUPTI_SUCCESS;
    self.phase = PREPARED;
    self.gave_way = false;
    hook_process();
    others_expect(&self.api, give_way);
    return self.arena->fd;
}

int kc_keep_calls(uint32_t domain, const char *patterns, size_t bytes) {
    if (self.dead || self.phase != PREPARED) {
        return self.dead ? KC_FORKED : KC_ORDER;
    }
    const bool known = domain == CUPTI_DOMAIN_DRIVER_API || domain == CUPTI_DOMAIN_RUNTIME_API;
    if (!known || bytes > CALLS_PATTERNS_BYTES) {
        return KC_ORDER;
    }
    memcpy(self.calls.patterns[domain], patterns, bytes);
    return 0;
}

int kc_subscribe(int32_t *result) {
    TURN;
    if (self.dead || self.phase != PREPARED || self.gave_way) {
        return self.dead ? KC_FORKED : KC_ORDER;
    }
    *result = subscription_open(&self.api);
    others_count(&self.api);
    return *result == CUPTI_SUCCESS ? 0 : KC_CUPTI;
}

int kc_others(struct kc_others *others) {
    if (self.dead || self.phase == CLOSED) {
        return self.dead ? KC_FORKED : KC_ORDER;
    }
    others_tell(others);
    return 0;
}

int kc_record_calls(char *error, size_t error_bytes) {
    TURN;
    if (self.dead || self.phase != RECORDING) {
        return refuse(self.dead ? KC_FORKED : KC_ORDER, error, error_bytes, "nothing is recorded");
    }
    records_open(&self.worker.work);
    const cupti_result result = subscription_follow(&self.api, &self.calls);
    if (result != CUPTI_SUCCESS) {
        records_close();
        return refuse_cupti(result, error, error_bytes);
    }
    return 0;
}

int kc_yield(void) {
    TURN;
    if (self.dead) {
        return KC_FORKED;
    }
    records_close();
    subscription_close(&self.api);
    return 0;
}

int kc_hurry(void) {
    if (self.dead) {
        return KC_FORKED;
    }
    detach_expire();
    return 0;
}

int kc_start(const uint32_t *kinds, uint32_t count, int32_t *results, char *error, size_t error_bytes) {
    TURN;
    if (self.dead || self.phase != PREPARED || self.gave_way || count > KINDS_MOST) {
        return refuse(self.dead ? KC_FORKED : KC_ORDER, error, error_bytes,
                      self.gave_way ? "another tool has taken CUPTI into use" : "not prepared");
    }
    /* What was dropped since the last recording: cuptiFinalize counts the kernel that it interrupts. */
    (void)worker_take_dropped(&self.worker);
    attachment_begins(&self.api);
    const cupti_result result = self.api.register_callbacks(pool_buffer_requested, pool_buffer_completed);
    if (result != CUPTI_SUCCESS) {
        return refuse_cupti(result, error, error_bytes);
    }
    (void)self.api.set_thread_id_type(CUPTI_THREAD_ID_SYSTEM);
    calls_select(&self.calls, &self.api, self.arena);
    clocks_begin(self.arena);
    /* Before the thread, which would have to drop a stray as long as nothing is lent. */
    pool_open(self.arena, &self.worker.work, self.config.may_decline != 0);
    const int number = worker_start(&self.worker);
    if (number != 0) {
        pool_close();
        listener_restore(&self.api);
        return refuse_system(error, error_bytes, "pthread_create", number);
    }
    self.phase = RECORDING;
    attachment_recording_begins();
    /* Before any kind is enabled: no launch may be missed. */
    self.graphs_watched = count == 0 || subscription_watch_graphs(&self.api, &self.calls) == CUPTI_SUCCESS;
    kinds_enable(&self.kinds, &self.api, kinds, count, results);
    if (self.kinds.count == 0 && count > 0) {
        return refuse(KC_CUPTI, error, error_bytes, "CUPTI enabled none of the wanted activities");
    }
    return 0;
}

int kc_counts(struct kc_counts *counts) {
    if (self.dead || self.phase == CLOSED) {
        return self.dead ? KC_FORKED : KC_ORDER;
    }
    counts->records = arena_load(self.arena, ARENA_RECORDS);
    counts->bytes = arena_load(self.arena, ARENA_VALID_BYTES);
    counts->dropped = arena_load(self.arena, ARENA_DROPPED);
    return 0;
}

int kc_stop(uint32_t limit_ms, struct kc_stop_result *result) {
    TURN;
    memset(result, 0, sizeof *result);
    const bool ended = self.phase == STOPPED && self.gave_way;
    if (self.dead || (self.phase != RECORDING && !ended)) {
        return self.dead ? KC_FORKED : KC_ORDER;
    }
    if (!ended) {
        stop_recording(limit_ms * NS_PER_MS);
    }
    *result = self.stopped;
    return 0;
}

int kc_detach(uint32_t limit_ms, struct kc_detach_result *result) {
    TURN;
    memset(result, 0, sizeof *result);
    if (self.dead || self.phase != STOPPED || self.abandoned) {
        return self.dead ? KC_FORKED : KC_ORDER;
    }
    detach_run(&self.api, limit_ms * NS_PER_MS, result);
    self.detached = result->outcome == KC_DETACHED;
    if (self.detached) {
        pool_drop_strays(); /* CUPTI may have handed some back as it left */
        retired_free();
    }
    return 0;
}

static int close_recording(void) {
    TURN;
    if (self.dead || self.phase == CLOSED) {
        return self.dead ? KC_FORKED : 0;
    }
    if (self.phase == RECORDING) {
        stop_recording(EXIT_LIMIT_NS);
    }
    struct arena *arena = self.arena;
    subscription_close(&self.api);
    self.close_pending = self.abandoned && !worker_has_ended(&self.worker);
    if (self.close_pending) {
        return KC_ORDER; /* the thread is inside CUPTI and will use the arena: kc_open tries again */
    }
    self.abandoned = false;
    pool_close();
    self.arena = NULL;
    self.phase = CLOSED;
    records_free();
    walker_free(&self.walker);
    if (!self.detached && pool_usage(arena).loaned > 0) {
        retired_add(arena);
    } else {
        arena_destroy(arena);
        free(arena);
    }
    return 0;
}

void kc_device(uint32_t index, const int32_t *attributes, uint32_t count, struct device_facts *facts) {
    device_describe(index, attributes, count, facts);
}

int kc_close(void) {
    const int code = close_recording();
    if (!self.dead) {
        gate_disarm(); /* not in our turn: somebody may be waiting for his */
    }
    return code;
}

void kc_result_text(int32_t result, char *text, size_t text_bytes) {
    const char *known = NULL;
    if (!self.opened || self.api.get_result_string(result, &known) != CUPTI_SUCCESS || known == NULL) {
        known = "unknown CUPTI result";
    }
    snprintf(text, text_bytes, "%s (%d)", known, result);
}
