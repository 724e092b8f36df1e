/* A collector's thread: publishes returned buffers, and flushes. */
#ifndef KINETO_KIT_COLLECTOR_THREAD_H
#define KINETO_KIT_COLLECTOR_THREAD_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/arena.h"
#include "common/wake.h"
#include "kit/buffer_pool.h"
#include "kit/parse_buffers.h"
#include "kit/record_stream.h"
#include "kit/retired_arenas.h"
#include "kit/vendor.h"

enum worker_command { WORKER_RUNS, WORKER_FINISHES, WORKER_EXITS };

struct worker {
    const struct kit_vendor *vendor;
    void (*close_writers)(void); /* closes record writers that do not push; may be NULL */
    struct arena *arena;
    struct walker *walker;
    struct pool *pool;
    struct stream *stream;
    const struct retired *retired;
    int64_t flush_period_ns;
    uint32_t may_flush; /* recording has begun */
    struct wake work;   /* posted when there is work */
    /* Read them once it has ended: */
    uint64_t cpu_ns;
    uint32_t flushes;
    int32_t flush_result;
    /* The thread's own: */
    pthread_t thread;
    _Atomic bool started;
    uint32_t command;
    uint32_t ended;
    struct wake end;
};

/* Returns 0 or an errno. */
int worker_start(struct worker *worker);
/* The library records from now on and may be flushed. */
void worker_may_flush(struct worker *worker);
/* Asks it to flush for the last time, unless recording never began, and to end; WORKER_FINISHES closes the arena, too.
 * False: it has not ended within `limit_ns`. */
bool worker_end(struct worker *worker, enum worker_command command, int64_t limit_ns);
/* Whether it has finished its work. */
bool worker_has_ended(const struct worker *worker);
/* Call once afterwards: joins it, or detaches it if it has not `ended`. */
void worker_leave(struct worker *worker, bool ended);
/* Returns how many records the library dropped since the last call. */
uint64_t worker_take_dropped(const struct worker *worker);
/* Whether the calling thread is this worker's. */
bool worker_is_here(const struct worker *worker);

#endif
