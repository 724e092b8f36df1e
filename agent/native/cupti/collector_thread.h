/* The collector's thread: publishes what CUPTI returns, and flushes. */
#ifndef KINETO_WORKER_H
#define KINETO_WORKER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/arena.h"
#include "cupti/cupti_api.h"
#include "common/wake.h"
#include "cupti/parse_buffers.h"

enum worker_command { WORKER_RUNS, WORKER_FINISHES, WORKER_EXITS };

struct worker {
    const struct cupti_api *api;
    struct arena *arena;
    struct walker *walker;
    int64_t flush_period_ns;
    struct wake work; /* posted when there is something to do */
    /* To be read once it has ended: */
    uint64_t cpu_ns;
    uint32_t flushes;
    cupti_result flush_result;
    /* Its own: */
    pthread_t thread;
    _Atomic bool started;
    uint32_t command;
    uint32_t ended;
    struct wake end;
};

/* 0 or an errno. */
int worker_start(struct worker *worker);
/* Tells it to flush for the last time and to end; WORKER_FINISHES closes the arena, too. False: it has not ended within
 * `limit_ns`. */
bool worker_end(struct worker *worker, enum worker_command command, int64_t limit_ns);
/* Whether it has done all it will do. */
bool worker_has_ended(const struct worker *worker);
/* Afterwards, once: joins it, or lets it go if it has not `ended`. */
void worker_leave(struct worker *worker, bool ended);
/* What CUPTI dropped since this was last asked. */
size_t worker_take_dropped(const struct worker *worker);

#endif
