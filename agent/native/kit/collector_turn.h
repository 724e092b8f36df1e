/* The turn to use a collector: the agent's thread has it, or a thread to which the agent yields. */
#ifndef KINETO_KIT_COLLECTOR_TURN_H
#define KINETO_KIT_COLLECTOR_TURN_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

struct turn {
    pthread_mutex_t mutex;
    uint32_t depth; /* under the mutex */
    uint32_t dead;
    void (*begins)(void); /* called for the outermost turn of a thread; may be NULL */
    void (*ends)(void);
};

#define TURN_INITIAL {.mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP}

/* Waits for the turn. May be nested. False in a forked child. */
bool turn_begin(struct turn *turn);
/* As turn_begin, but waits `limit_ns` at most and calls `hurry`, if not NULL, from time to time. False: no turn. */
bool turn_begin_within(struct turn *turn, int64_t limit_ns, void (*hurry)(void));
void turn_end(struct turn *turn);
/* In a forked child: no turn begins any more. */
void turn_kill(struct turn *turn);

static inline void turn_leave(struct turn **begun) {
    if (*begun != NULL) {
        turn_end(*begun);
    }
}
/* Has the turn until the end of the block. */
#define TURN(whose) \
    __attribute__((cleanup(turn_leave), unused)) struct turn *turn_begun = turn_begin(whose) ? (whose) : NULL

#endif
