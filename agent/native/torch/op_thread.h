/* What one thread does while ops are recorded: its stack of open ops, its buffer. */
#ifndef KINETO_OPS_THREAD_H
#define KINETO_OPS_THREAD_H

#include <stdbool.h>
#include <stdint.h>

#include "common/arena.h"
#include "torch/observer.h"

struct ops_totals {
    uint64_t ended_elsewhere;
    uint64_t unfinished;
    uint64_t too_deep;
    uint64_t unserved;
    uint64_t threads;
    uint64_t stuck;
};

/* Room for all threads there can be, once for the life of the process. 0 or an errno. */
int ops_threads_prepare(void);
/* Ops that begin from now on are recorded. `thread_number` is torch's; `layout` may be NULL: no sequence numbers;
 * `name` gives the name of a RecordFunction. */
void ops_threads_open(struct arena *arena, const struct kc_observer_layout *layout, bool inputs,
                      const char *(*name)(const void *), uint64_t (*thread_number)(void));
/* Nothing more is recorded. Safe anywhere, also in a forked child and at exit. */
void ops_threads_close(void);
/* After close: waits until nobody is inside, `limit_ns` at most, then makes what there is READY. */
void ops_threads_collect(int64_t limit_ns, struct ops_totals *totals);
/* True if a thread is inside a callback. */
bool ops_threads_inside(void);
/* In a forked child, whose only thread this is. */
void ops_threads_forked(void);

/* The callbacks' work, on whatever thread. */
void ops_begin(const void *function, uint8_t scope);
void ops_end(const void *function);

#endif
