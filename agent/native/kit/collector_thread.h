/* A collector's thread: publishes what the library returns, and flushes. */
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
    void (*close_writers)(void); /* of records that no one pushes; may be NULL */
    struct arena *arena;
    struct walker *walker;
    struct pool *pool;
    struct stream *stream;
    const struct retired *retired;
    int64_t flush_period_ns;
    uint32_t may_flush; /* recording has begun */
    struct wake work;   /* posted when there is something to do */
    /* To be read once it has ended: */
    uint64_t cpu_ns;
    uint32_t flushes;
    int32_t flush_result;
    /* Its own: */
    pthread_t thread;
    _Atomic bool started;
    uint32_t command;
    uint32_t ended;
    struct wake end;
};

/* 0 or an errno. */
int worker_start(struct worker *worker);
/* The library records from now on: it may be asked for what it has. */
void worker_may_flush(struct worker *worker);
/* Tells it to flush for the last time, unless recording never began, and to end; WORKER_FINISHES closes the arena, too.
 * False: it has not ended within `limit_ns`. */
bool worker_end(struct worker *worker, enum worker_command command, int64_t limit_ns);
/* Whether it has done all it will do. */
bool worker_has_ended(const struct worker *worker);
/* Afterwards, once: joins it, or lets it go if it has not `ended`. */
void worker_leave(struct worker *worker, bool ended);
/* What the library dropped since this was last asked. */
uint64_t worker_take_dropped(const struct worker *worker);
/* Whether the calling thread is this worker's. */
bool worker_is_here(const struct worker *worker);

#endif
