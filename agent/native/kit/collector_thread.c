/* Theory of operation
 *
 *   The thread is the only writer of the header's counters and of the string table while recording. It exists only
 *   between start and stop; it publishes returned buffers, backs more buffers with memory ahead of their use, and
 *   flushes the library periodically, so that a crash loses no more than one period.
 *
 *   The last, forced flush runs on the thread too, so that a stop can give up waiting when the library does not return.
 *   There are no locks, so none is held across a call of the library.
 *
 * Threads: the collector's own, with signals blocked; worker_start, worker_end and worker_leave run on the thread
 *   that has the turn.
 * Blocks: the thread sleeps between its tasks and may block inside the library's flush. worker_end waits for it until
 *   its limit.
 */
#define _GNU_SOURCE
#include "kit/collector_thread.h"

#include <sched.h>
#include <string.h>
#include <time.h>

#include "common/own_threads.h"
#include "kit/clock_samples.h"

#define AHEAD_BYTES (16u << 20) /* backed by memory beyond the highest in use: 0.15 s of 1 M records/s */
#define FLUSH_FREE_LEAST 2u     /* a flush uses up partly filled buffers: not when few are free */
#define WRITERS_LIMIT_NS 100000000LL

static _Thread_local const struct worker *own;

bool worker_is_here(const struct worker *worker) { return own == worker; }

static void adopt_strays(struct worker *worker) {
    size_t valid;
    for (uint8_t *buffer = pool_take_stray(worker->pool, &valid); buffer != NULL;
         buffer = pool_take_stray(worker->pool, &valid)) {
        const int64_t index = valid == 0 ? -1 : pool_lend(worker->pool, worker->arena);
        const uint32_t slot = (uint32_t)index;
        if (index >= 0) { /* buffers of all arenas have the same size */
            memcpy(arena_buffer(worker->arena, slot), buffer, valid);
            *arena_buffer_word(worker->arena, slot, ARENA_BUFFER_VALID_BYTES) = valid;
            walker_publish(worker->walker, slot);
        } else {
            walker_drop(worker->walker, buffer, valid);
        }
        retired_release(worker->retired, buffer);
    }
}

static void publish_returned(struct worker *worker) {
    (void)stream_collect(worker->stream, worker->arena);
    adopt_strays(worker);
    for (uint32_t i = 0; i < worker->arena->fixed.buffer_count; i++) {
        if (arena_load_state(worker->arena, i) == ARENA_COMPLETED) {
            walker_publish(worker->walker, i);
        }
    }
    size_t valid;
    for (uint8_t *buffer = pool_take_spill(worker->pool, &valid); buffer != NULL;
         buffer = pool_take_spill(worker->pool, &valid)) {
        walker_drop(worker->walker, buffer, valid);
        pool_free_spill(worker->pool, buffer);
    }
}

uint64_t worker_take_dropped(const struct worker *worker) {
    return worker->vendor->take_dropped == NULL ? 0 : worker->vendor->take_dropped();
}

static void sample_clocks(const struct worker *worker) {
    clocks_sample(worker->arena);
    if (worker->vendor->read_clock != NULL) {
        clocks_add_pair(worker->arena, worker->vendor->read_clock);
    }
}

void worker_may_flush(struct worker *worker) { __atomic_store_n(&worker->may_flush, 1, __ATOMIC_SEQ_CST); }

static bool may_flush(const struct worker *worker) {
    return __atomic_load_n(&worker->may_flush, __ATOMIC_SEQ_CST) != 0;
}

static void flush(struct worker *worker, bool forced) {
    stream_seal(worker->stream);
    worker->flush_result = worker->vendor->flush(forced);
    worker->flushes++;
    arena_add(worker->arena, ARENA_DROPPED, worker_take_dropped(worker));
    sample_clocks(worker);
}

static void populate_ahead(struct worker *worker) {
    const uint64_t used = pool_usage(worker->arena).top * worker->arena->fixed.buffer_bytes;
    arena_populate(worker->arena, used + AHEAD_BYTES);
}

static void work_until_told(struct worker *worker) {
    const int64_t period = worker->flush_period_ns;
    int64_t next_flush = clock_ns(CLOCK_MONOTONIC) + period;
    for (;;) {
        const uint32_t seen = wake_seen(&worker->work);
        if (__atomic_load_n(&worker->command, __ATOMIC_SEQ_CST) != WORKER_RUNS) {
            return;
        }
        publish_returned(worker);
        populate_ahead(worker);
        const int64_t now = clock_ns(CLOCK_MONOTONIC);
        if (now >= next_flush) {
            next_flush = now + period;
            if (may_flush(worker) && pool_usage(worker->arena).free >= FLUSH_FREE_LEAST) {
                flush(worker, false);
            }
            continue;
        }
        wake_wait(&worker->work, seen, next_flush - now);
    }
}

/* Waits for records that callbacks are still writing; that takes well under a microsecond unless their thread is
 * preempted. */
static void await_writers(struct worker *worker) {
    const int64_t deadline = clock_ns(CLOCK_MONOTONIC) + WRITERS_LIMIT_NS;
    if (worker->close_writers != NULL) {
        worker->close_writers();
    }
    stream_close(worker->stream);
    while (!pool_is_idle(worker->pool) && clock_ns(CLOCK_MONOTONIC) < deadline) {
        sched_yield();
    }
    stream_seal(worker->stream);
    while (stream_collect(worker->stream, worker->arena) && clock_ns(CLOCK_MONOTONIC) < deadline) {
        sched_yield();
    }
}

static void *run_thread(void *started) {
    struct worker *worker = started;
    own = worker;
    if (worker->vendor->read_clock != NULL) {
        clocks_add_pair(worker->arena, worker->vendor->read_clock);
    }
    work_until_told(worker);
    const bool finish = __atomic_load_n(&worker->command, __ATOMIC_SEQ_CST) == WORKER_FINISHES;
    if (may_flush(worker)) {
        flush(worker, finish);
    }
    publish_returned(worker);
    pool_stop_lending(worker->pool);
    await_writers(worker);
    publish_returned(worker);
    if (finish) {
        arena_store(worker->arena, ARENA_CLOSED, 1);
    }
    worker->cpu_ns = (uint64_t)clock_ns(CLOCK_THREAD_CPUTIME_ID);
    __atomic_store_n(&worker->ended, 1, __ATOMIC_SEQ_CST);
    wake_post(&worker->end);
    return NULL;
}

int worker_start(struct worker *worker) {
    sigset_t before;
    worker->command = WORKER_RUNS;
    worker->may_flush = 0;
    worker->ended = 0;
    block_signals(&before);
    const int error = pthread_create(&worker->thread, NULL, run_thread, worker);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error == 0) {
        (void)pthread_setname_np(worker->thread, "kineto-collect");
        worker->started = true;
    }
    return error;
}

bool worker_end(struct worker *worker, enum worker_command command, int64_t limit_ns) {
    uint32_t running = WORKER_RUNS; /* an earlier command stays: the process may be exiting */
    (void)__atomic_compare_exchange_n(&worker->command, &running, command, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    wake_post(&worker->work);
    return wake_await(&worker->end, &worker->ended, 1, limit_ns);
}

bool worker_has_ended(const struct worker *worker) { return __atomic_load_n(&worker->ended, __ATOMIC_SEQ_CST) != 0; }

void worker_leave(struct worker *worker, bool ended) {
    if (atomic_exchange(&worker->started, false)) { /* otherwise an exiting process has joined it */
        (void)(ended ? pthread_join(worker->thread, NULL) : pthread_detach(worker->thread));
    }
}
