/* See collector_turn.h.
 *
 * Threads: the agent's, and any of the program's to which the agent yields or that exits.
 * Blocks: turn_begin waits for the turn without a limit, turn_begin_within up to its limit.
 */
#define _GNU_SOURCE
#include "kit/collector_turn.h"

#include <time.h>

#include "common/wake.h"

#define LOOK_NS 500000L

static bool taken(struct turn *turn) {
    if (turn->depth++ == 0 && turn->begins != NULL) {
        turn->begins();
    }
    return true;
}

static bool is_dead(const struct turn *turn) { return __atomic_load_n(&turn->dead, __ATOMIC_SEQ_CST) != 0; }

bool turn_begin(struct turn *turn) { return !is_dead(turn) && pthread_mutex_lock(&turn->mutex) == 0 && taken(turn); }

bool turn_begin_within(struct turn *turn, int64_t limit_ns, void (*hurry)(void)) {
    const int64_t deadline = clock_ns(CLOCK_MONOTONIC) + limit_ns;
    const struct timespec pause = {.tv_nsec = LOOK_NS};
    while (!is_dead(turn)) {
        if (pthread_mutex_trylock(&turn->mutex) == 0) {
            return taken(turn);
        }
        if (clock_ns(CLOCK_MONOTONIC) >= deadline) {
            break;
        }
        if (hurry != NULL) {
            hurry();
        }
        (void)nanosleep(&pause, NULL);
    }
    return false;
}

void turn_end(struct turn *turn) {
    if (--turn->depth == 0 && turn->ends != NULL) {
        turn->ends();
    }
    pthread_mutex_unlock(&turn->mutex);
}

void turn_kill(struct turn *turn) { __atomic_store_n(&turn->dead, 1, __ATOMIC_SEQ_CST); }
