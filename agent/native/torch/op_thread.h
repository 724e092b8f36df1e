/* The per-thread work while ops are recorded: the stack of open ops and the buffer. */
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

/* Allocates room for the maximum number of threads, once for the life of the process. Returns 0 or an errno. */
int ops_threads_prepare(void);
/* Starts recording ops that begin from now on. `thread_number` is torch's; `layout` may be NULL: no sequence numbers;
 * `name` returns the name of a RecordFunction. */
void ops_threads_open(struct arena *arena, const struct kc_observer_layout *layout, bool inputs,
                      const char *(*name)(const void *), uint64_t (*thread_number)(void));
/* Ends recording. Safe anywhere, also in a forked child and at exit. */
void ops_threads_close(void);
/* After close: waits until no thread is inside, `limit_ns` at most, then makes what was written READY. */
void ops_threads_collect(int64_t limit_ns, struct ops_totals *totals);
/* True if a thread is inside a callback. */
bool ops_threads_inside(void);
/* In a forked child, which has only this thread. */
void ops_threads_forked(void);

/* The work of the callbacks, on any thread. */
void ops_begin(const void *function, uint8_t scope);
void ops_end(const void *function);

#endif
