/* The vendor-independent part of a collector. collector.h and kit.h describe its use.
 *
 * Theory of operation
 *   Three parties meet in one arena: the library's threads (buffer_pool.c, record_stream.c), the collector's thread
 *   (collector_thread.c, parse_buffers.c), and the daemon, which copies READY buffers from its own mapping and sets
 *   them FREE.
 *
 *   Fork: the arena is not mapped in the child (MADV_DONTFORK), the descriptor is closed there and every function
 *   refuses. A library that does not notice the fork may go on filling buffers that it was lent: private memory of the
 *   child takes the arena's place. Exit: a handler lets the thread publish what has been returned and end, before the
 *   library's own exit handlers tear it down. Handlers that it registered before the collector was prepared run later
 *   anyway; because of those that it registers when recording first begins, our handler is registered once more.
 *
 * Threads: the agent's, without the GIL, or one of the program to which the agent yields; collector_exits on the one
 *   that exits, collector_forked in a forked child; the functions of hosts on any thread.
 * Blocks: inside the vendor's library; collector_stop, collector_close and collector_exits wait for their limits at
 *   most. The functions of hosts never do.
 */
#define _GNU_SOURCE
#include "kit/collector.h"

#include <stdlib.h>
#include <string.h>

#include "common/error_text.h"
#include "kit/clock_samples.h"
#include "kit/collector_slots.h"

#define NS_PER_MS 1000000LL
#define BUFFERS_LEAST 2u
#define BUFFERS_MOST 65536u
#define EXIT_LIMIT_NS 1000000000LL
#define EXIT_HOOKED_PREPARED 1u
#define EXIT_HOOKED_STARTED 2u

static const struct collector_hooks NO_HOOKS;

static const struct collector_hooks *hooks_of(const struct kit_collector *collector) {
    return collector->hooks == NULL ? &NO_HOOKS : collector->hooks;
}

enum collector_phase collector_phase(const struct kit_collector *collector) {
    return (enum collector_phase)__atomic_load_n(&collector->phase, __ATOMIC_SEQ_CST);
}

static void set_phase(struct kit_collector *collector, enum collector_phase phase) {
    __atomic_store_n(&collector->phase, phase, __ATOMIC_SEQ_CST);
}

int collector_refuses(const struct kit_collector *collector) {
    if (__atomic_load_n(&collector->dead, __ATOMIC_SEQ_CST)) {
        return KC_FORKED;
    }
    return __atomic_load_n(&collector->exiting, __ATOMIC_SEQ_CST) ? KC_ORDER : 0;
}

static int refuse_named(const struct kit_collector *collector, int code, char *error, size_t error_bytes,
                        const char *text) {
    snprintf(error, error_bytes, "%s %s", collector->vendor->name, text);
    return code;
}

/* ---- fork and exit ---- */

void collector_forked(struct kit_collector *collector) {
    __atomic_store_n(&collector->dead, 1, __ATOMIC_SEQ_CST);
    pool_kill(&collector->pool);
    if (collector->vendor->forked != NULL) {
        collector->vendor->forked();
    }
    turn_kill(&collector->turn);
    if (collector->arena != NULL) {
        arena_forked(collector->arena); /* closed, otherwise the daemon would not see the end of this process */
    }
    retired_forked(&collector->retired);
}

/* The turn is kept: from now on no one enters the library through us; its exit handlers tear it down next. */
void collector_exits(struct kit_collector *collector) {
    if (collector_refuses(collector) != 0) {
        return;
    }
    (void)turn_begin_within(&collector->turn, EXIT_LIMIT_NS, hooks_of(collector)->hurry);
    __atomic_store_n(&collector->exiting, 1, __ATOMIC_SEQ_CST);
    if (collector->vendor->stops_at_exit && collector->vendor_started &&
        collector_phase(collector) == COLLECTOR_RECORDING) {
        collector->vendor->stop();
    }
    if (collector->worker.started && worker_end(&collector->worker, WORKER_EXITS, EXIT_LIMIT_NS)) {
        worker_leave(&collector->worker, true);
    }
}

static void hook_exit(struct kit_collector *collector, uint32_t when) {
    if ((collector->exit_hooked & when) == 0) {
        collector->exit_hooked |= when;
        collectors_hook_exit(collector);
    }
}

/* ---- from open to start ---- */

int collector_open(struct kit_collector *collector, const char *path, char *error, size_t error_bytes) {
    const int refused = collector_refuses(collector);
    if (refused == KC_FORKED) {
        return refuse_named(collector, refused, error, error_bytes, "does not work in a forked child process");
    }
    if (refused != 0) {
        return refuse(refused, error, error_bytes, "the process is exiting");
    }
    if (collector->close_pending) {
        (void)collector_close(collector);
    }
    if (collector->close_pending) {
        return refuse_named(collector, KC_ORDER, error, error_bytes,
                            "has not ended the previous recording yet: try again later");
    }
    if (collector_phase(collector) != COLLECTOR_CLOSED) {
        return refuse(KC_ORDER, error, error_bytes, "a recording is still open");
    }
    collector->opened = false;
    memset(&collector->library, 0, sizeof collector->library);
    const int code = collector->vendor->open(collector->host, path, &collector->library, error, error_bytes);
    if (code != 0) {
        return code < 0 ? code : KC_VENDOR;
    }
    const char *why = walker_refuses(&collector->library);
    if (*why != 0) {
        return refuse_named(collector, KC_LIBRARY, error, error_bytes, why);
    }
    collector->opened = true;
    return 0;
}

static uint32_t buffer_count(const struct kit_config *config) {
    const uint64_t count = config->buffer_limit_bytes / config->buffer_bytes;
    return count < BUFFERS_LEAST ? BUFFERS_LEAST : count > BUFFERS_MOST ? BUFFERS_MOST : (uint32_t)count;
}

static void describe_work(struct kit_collector *collector) {
    struct worker *worker = &collector->worker;
    worker->vendor = collector->vendor;
    worker->close_writers = hooks_of(collector)->close_writers;
    worker->arena = collector->arena;
    worker->walker = &collector->walker;
    worker->pool = &collector->pool;
    worker->stream = &collector->stream;
    worker->retired = &collector->retired;
    worker->flush_period_ns = collector->config.flush_period_ms * NS_PER_MS;
    worker->flushes = 0;
    worker->cpu_ns = 0;
    worker->flush_result = 0;
}

static int make_arena(struct kit_collector *collector, char *error, size_t error_bytes) {
    const struct kit_config *config = &collector->config;
    const char *step = "malloc";
    struct arena *arena = malloc(sizeof *arena);
    if (arena == NULL) {
        return refuse(KC_SYSTEM, error, error_bytes, "out of memory");
    }
    const int number = arena_create(arena, buffer_count(config), config->buffer_bytes, config->strings_bytes, &step);
    if (number != 0) {
        free(arena);
        return refuse_system(error, error_bytes, step, number);
    }
    if (!walker_init(&collector->walker, collector->vendor, &collector->library, arena) ||
        !stream_init(&collector->stream, arena->fixed.buffer_count, &collector->worker.work)) {
        stream_free(&collector->stream);
        walker_free(&collector->walker);
        arena_destroy(arena);
        free(arena);
        return refuse(KC_SYSTEM, error, error_bytes, "out of memory");
    }
    arena_populate(arena, config->prefault_bytes);
    collector->arena = arena;
    return 0;
}

int collector_prepare(struct kit_collector *collector, const struct kit_config *config, char *error,
                      size_t error_bytes) {
    const int refused = collector_refuses(collector);
    if (refused != 0 || !collector->opened || collector_phase(collector) != COLLECTOR_CLOSED) {
        return refuse(refused != 0 ? refused : KC_ORDER, error, error_bytes, "not open, or a recording is still open");
    }
    if (config->buffer_bytes < ARENA_PAGE_BYTES) {
        return refuse(KC_ORDER, error, error_bytes, "a buffer of less than a page");
    }
    const bool lends = collector->vendor->next_record != NULL && collector->library.when_full != KIT_FULL_DECLINES;
    const int number = lends ? pool_prepare_spill(&collector->pool) : 0;
    if (number != 0) {
        return refuse_system(error, error_bytes, "mmap", number);
    }
    collector->config = *config;
    const int code = make_arena(collector, error, error_bytes);
    if (code != 0) {
        return code;
    }
    describe_work(collector);
    memset(&collector->stopped, 0, sizeof collector->stopped);
    set_phase(collector, COLLECTOR_PREPARED);
    hook_exit(collector, EXIT_HOOKED_PREPARED);
    return collector->arena->fd;
}

static int begin(struct kit_collector *collector, char *error, size_t error_bytes) {
    /* Discards the count since the last recording: cuptiFinalize counts the kernel that it interrupts. */
    (void)worker_take_dropped(&collector->worker);
    const int code = hooks_of(collector)->begin == NULL
                         ? 0
                         : hooks_of(collector)->begin(collector->arena, error, error_bytes);
    if (code != 0) {
        return code;
    }
    clocks_begin(collector->arena);
    /* Before the thread starts, which would have to drop a stray as long as nothing is lent. */
    pool_open(&collector->pool, collector->arena, &collector->worker.work,
              (enum kit_when_full)collector->library.when_full);
    const int number = worker_start(&collector->worker);
    if (number != 0) {
        pool_close(&collector->pool);
        if (collector->vendor->release != NULL) {
            collector->vendor->release();
        }
        return refuse_system(error, error_bytes, "pthread_create", number);
    }
    set_phase(collector, COLLECTOR_RECORDING);
    return 0;
}

int collector_start(struct kit_collector *collector, const uint32_t *kinds, uint32_t count, int32_t *results,
                    char *error, size_t error_bytes) {
    const int refused = collector_refuses(collector);
    if (refused != 0 || collector_phase(collector) != COLLECTOR_PREPARED || count > KIT_KINDS_MOST) {
        return refuse(refused != 0 ? refused : KC_ORDER, error, error_bytes, "not prepared");
    }
    collector->vendor_started = false;
    int code = begin(collector, error, error_bytes);
    if (code != 0) {
        return code;
    }
    code = collector->vendor->start(kinds, count, results, error, error_bytes);
    collector->vendor_started = code == 0;
    worker_may_flush(&collector->worker);
    hook_exit(collector, EXIT_HOOKED_STARTED);
    return code > 0 ? KC_VENDOR : code;
}

/* ---- from counts to close ---- */

int collector_counts(const struct kit_collector *collector, struct kc_counts *counts) {
    if (collector_refuses(collector) == KC_FORKED || collector_phase(collector) == COLLECTOR_CLOSED) {
        return collector_refuses(collector) == KC_FORKED ? KC_FORKED : KC_ORDER;
    }
    counts->records = arena_load(collector->arena, ARENA_RECORDS);
    counts->bytes = arena_load(collector->arena, ARENA_VALID_BYTES);
    counts->dropped = arena_load(collector->arena, ARENA_DROPPED);
    return 0;
}

void collector_stop(struct kit_collector *collector, int64_t limit_ns) {
    struct kit_stop_result *result = &collector->stopped;
    const struct worker *worker = &collector->worker;
    memset(result, 0, sizeof *result);
    if (collector->vendor_started) {
        collector->vendor->stop();
    }
    set_phase(collector, COLLECTOR_STOPPED);
    collector->abandoned = !worker_end(&collector->worker, WORKER_FINISHES, limit_ns);
    worker_leave(&collector->worker, !collector->abandoned);
    result->timed_out = collector->abandoned;
    result->withheld = pool_usage(collector->arena).loaned;
    result->uncounted = __atomic_load_n(&collector->pool.uncounted, __ATOMIC_RELAXED);
    (void)collector_counts(collector, &result->counts);
    if (collector->abandoned) {
        return;
    }
    if (result->withheld == 0 && collector->vendor->release != NULL) {
        collector->vendor->release();
    }
    result->cpu_ns = worker->cpu_ns;
    result->names_lost = collector->walker.names_lost;
    result->irregular_records = collector->walker.irregular_records;
    result->flushes = worker->flushes;
    result->flush_result = worker->flush_result;
}

void collector_library_left(struct kit_collector *collector) {
    pool_drop_strays(&collector->pool); /* it may have returned some as it left */
    retired_free(&collector->retired);
    collector->library_left = true;
}

int collector_close(struct kit_collector *collector) {
    struct arena *arena = collector->arena;
    const bool dead = collector_refuses(collector) == KC_FORKED;
    if (dead || collector_phase(collector) == COLLECTOR_CLOSED) {
        return dead ? KC_FORKED : 0;
    }
    if (collector_phase(collector) == COLLECTOR_RECORDING) {
        collector_stop(collector, EXIT_LIMIT_NS);
    }
    collector->close_pending = collector->abandoned && !worker_has_ended(&collector->worker);
    if (collector->close_pending) {
        return KC_ORDER; /* the thread is inside the library and will use the arena: collector_open tries again */
    }
    collector->abandoned = false;
    pool_close(&collector->pool);
    collector->arena = NULL;
    set_phase(collector, COLLECTOR_CLOSED);
    stream_free(&collector->stream);
    walker_free(&collector->walker);
    if (!collector->library_left && pool_usage(arena).loaned > 0) {
        retired_add(&collector->retired, arena);
    } else {
        arena_destroy(arena);
        free(arena);
    }
    collector->library_left = false;
    return 0;
}

/* ---- what hosts call ---- */

static uint8_t *add_part(uint8_t *place, const void *part, uint32_t bytes) {
    if (bytes > 0) {
        memcpy(place, part, bytes);
    }
    return place + bytes;
}

/* Writes a record of two parts behind a header. False: no room, or no recording. */
static bool push(struct kit_collector *collector, uint32_t kind, const void *head, uint32_t head_bytes,
                 const void *body, uint32_t body_bytes) {
    static const uint64_t PADDING;
    const uint32_t bare = (uint32_t)sizeof(struct kit_header) + head_bytes + body_bytes;
    const struct kit_header header = {.kind = kind, .bytes = (bare + 7) & ~7u};
    uint8_t *place = NULL;
    uint32_t index;
    struct arena *arena = pool_enter(&collector->pool);
    const bool recording = arena != NULL && stream_is_open(&collector->stream);
    if (recording && header.bytes <= arena->fixed.buffer_bytes) {
        place = stream_reserve(&collector->stream, &collector->pool, arena, header.bytes, &index);
    }
    if (place != NULL) {
        uint8_t *at = add_part(place, &header, sizeof header);
        at = add_part(at, head, head_bytes);
        at = add_part(at, body, body_bytes);
        (void)add_part(at, &PADDING, header.bytes - bare);
        stream_commit(&collector->stream, index, header.bytes);
    } else if (recording && kind != KIT_KIND_TEXT) {
        stream_drop(&collector->stream, 1);
    }
    pool_leave(&collector->pool);
    return place != NULL;
}

bool collector_push(struct kit_collector *collector, uint32_t kind, const void *record, uint32_t bytes) {
    if (collector->vendor->next_record != NULL || kind == KIT_KIND_TEXT || bytes > KIT_PUSHED_BYTES_MOST) {
        return false; /* vendor.h does not allow it */
    }
    return push(collector, kind, NULL, 0, record, bytes);
}

bool collector_add_text(struct kit_collector *collector, uint32_t space, uint64_t key, const char *text,
                        uint32_t length) {
    const uint32_t most = length < KIT_TEXT_BYTES_MOST ? length : KIT_TEXT_BYTES_MOST;
    if (worker_is_here(&collector->worker)) {
        return walker_add_text(&collector->walker, space, key, text, most);
    }
    const struct arena_string head = {.key = key, .space = space, .length = most};
    return push(collector, KIT_KIND_TEXT, &head, sizeof head, text, most);
}

void collector_dropped(struct kit_collector *collector, uint64_t records) {
    if (pool_enter(&collector->pool) != NULL && stream_is_open(&collector->stream)) {
        stream_drop(&collector->stream, records);
    }
    pool_leave(&collector->pool);
}
