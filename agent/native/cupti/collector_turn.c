/* See collector_turn.h.
 *
 * Threads: the agent's, and any of the program's that is given way to or exits.
 * Blocks: turn_begin waits for the turn without a limit, turn_begin_within up to its limit.
 */
#define _GNU_SOURCE
#include "cupti/collector_turn.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "cupti/cupti_gate.h"
#include "common/wake.h"

#define LOOK_NS 500000L

static struct {
    pthread_mutex_t mutex;
    uint32_t depth; /* under the mutex */
    _Atomic bool dead;
} turn = {.mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP};

static bool taken(void) {
    if (turn.depth++ == 0) {
        gate_ours_begin();
    }
    return true;
}

bool turn_begin(void) { return !atomic_load(&turn.dead) && pthread_mutex_lock(&turn.mutex) == 0 && taken(); }

bool turn_begin_within(int64_t limit_ns, void (*hurry)(void)) {
    const int64_t deadline = clock_ns(CLOCK_MONOTONIC) + limit_ns;
    const struct timespec pause = {.tv_nsec = LOOK_NS};
    while (!atomic_load(&turn.dead)) {
        if (pthread_mutex_trylock(&turn.mutex) == 0) {
            return taken();
        }
        if (clock_ns(CLOCK_MONOTONIC) >= deadline) {
            break;
        }
        hurry();
        (void)nanosleep(&pause, NULL);
    }
    return false;
}

void turn_end(void) {
    if (--turn.depth == 0) {
        gate_ours_end();
    }
    pthread_mutex_unlock(&turn.mutex);
}

void turn_kill(void) { atomic_store(&turn.dead, true); }
