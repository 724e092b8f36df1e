/* Theory of operation
 *
 *   The thread is the only writer of the header's counters and of the string table while recording. It exists between
 *   kc_start and kc_stop alone; it publishes returned buffers, backs more buffers with memory ahead of their use, and
 *   flushes CUPTI now and then, so that a crash loses no more than one period.
 *
 *   The last, forced flush runs on the thread too, so that kc_stop can give up waiting when CUPTI does not
 *   return. No lock is held across a CUPTI call: there is none.
 *
 * Threads: the collector's own, with signals blocked; worker_start, worker_end and worker_leave run on the thread
 *   that has the turn.
 * Blocks: the thread sleeps between its tasks and may block inside CUPTI's flush. worker_end waits for it until its
 *   limit.
 */
#define _GNU_SOURCE
#include "cupti/collector_thread.h"

#include <sched.h>
#include <string.h>
#include <time.h>

#include "common/own_threads.h"
#include "cupti/clock_samples.h"
#include "cupti/buffer_pool.h"
#include "cupti/call_records.h"
#include "cupti/retired_arenas.h"

#define BUFFERS_AHEAD 4u    /* backed by memory beyond the highest in use: 16 MiB, 0.15 s of 1 M records/s */
#define FLUSH_FREE_LEAST 2u /* a flush uses up partly filled buffers: not when they are scarce */
#define WRITERS_LIMIT_NS 100000000LL

static void adopt_strays(struct worker *worker) {
    size_t valid;
    for (uint8_t *buffer = pool_take_stray(&valid); buffer != NULL; buffer = pool_take_stray(&valid)) {
        const int64_t index = valid == 0 ? -1 : pool_lend(worker->arena);
        const uint32_t slot = (uint32_t)index;
        if (index >= 0) { /* buffers of all arenas have one size */
            memcpy(arena_buffer(worker->arena, slot), buffer, valid);
            *arena_buffer_word(worker->arena, slot, ARENA_BUFFER_VALID_BYTES) = valid;
            walker_publish(worker->walker, slot);
        } else {
            walker_drop(worker->walker, buffer, valid);
        }
        retired_release(buffer);
    }
}

static void publish_returned(struct worker *worker) {
    (void)records_collect(worker->arena);
    adopt_strays(worker);
    for (uint32_t i = 0; i < worker->arena->fixed.buffer_count; i++) {
        if (arena_load_state(worker->arena, i) == ARENA_COMPLETED) {
            walker_publish(worker->walker, i);
        }
    }
    size_t valid;
    for (uint8_t *buffer = pool_take_spill(&valid); buffer != NULL; buffer = pool_take_spill(&valid)) {
        walker_drop(worker->walker, buffer, valid);
        pool_free_spill(buffer);
    }
}

size_t worker_take_dropped(const struct worker *worker) {
    size_t dropped = 0;
    return worker->api->get_num_dropped(NULL, 0, &dropped) == CUPTI_SUCCESS ? dropped : 0;
}

static void flush(struct worker *worker, uint32_t flag) {
    records_seal();
    worker->flush_result = worker->api->flush_all(flag);
    worker->flushes++;
    arena_add(worker->arena, ARENA_DROPPED, worker_take_dropped(worker));
    clocks_sample(worker->arena);
}

static void populate_ahead(struct worker *worker) {
    const uint64_t buffers = (uint64_t)pool_usage(worker->arena).top + BUFFERS_AHEAD;
    arena_populate(worker->arena, buffers * worker->arena->fixed.buffer_bytes);
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
            if (pool_usage(worker->arena).free >= FLUSH_FREE_LEAST) {
                flush(worker, CUPTI_FLUSH_DEFAULT);
            }
            continue;
        }
        wake_wait(&worker->work, seen, next_flush - now);
    }
}

/* What callbacks have begun to write; they take well under a microsecond unless their thread is put aside. */
static void await_writers(struct worker *worker) {
    const int64_t deadline = clock_ns(CLOCK_MONOTONIC) + WRITERS_LIMIT_NS;
    records_close();
    records_seal();
    while (records_collect(worker->arena) && clock_ns(CLOCK_MONOTONIC) < deadline) {
        sched_yield();
    }
}

static void *run_thread(void *started) {
    struct worker *worker = started;
    work_until_told(worker);
    const bool finish = __atomic_load_n(&worker->command, __ATOMIC_SEQ_CST) == WORKER_FINISHES;
    flush(worker, finish ? CUPTI_FLUSH_FORCED : CUPTI_FLUSH_DEFAULT);
    publish_returned(worker);
    pool_stop_lending();
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
    uint32_t running = WORKER_RUNS; /* a command given before stands: the process may be exiting meanwhile */
    (void)__atomic_compare_exchange_n(&worker->command, &running, command, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    wake_post(&worker->work);
    return wake_await(&worker->end, &worker->ended, 1, limit_ns);
}

bool worker_has_ended(const struct worker *worker) { return __atomic_load_n(&worker->ended, __ATOMIC_SEQ_CST) != 0; }

void worker_leave(struct worker *worker, bool ended) {
    if (atomic_exchange(&worker->started, false)) { /* else an exiting process has joined it */
        (void)(ended ? pthread_join(worker->thread, NULL) : pthread_detach(worker->thread));
    }
}
