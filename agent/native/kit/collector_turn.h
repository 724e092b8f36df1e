/* Whose turn it is to use a collector: the agent's thread, or that of somebody who is given way to. */
#ifndef KINETO_KIT_COLLECTOR_TURN_H
#define KINETO_KIT_COLLECTOR_TURN_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

struct turn {
    pthread_mutex_t mutex;
    uint32_t depth; /* under the mutex */
    uint32_t dead;
    void (*begins)(void); /* the outermost turn of a thread; NULL: nobody is told */
    void (*ends)(void);
};

#define TURN_INITIAL {.mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP}

/* Waits. May be nested. False in a forked child. */
bool turn_begin(struct turn *turn);
/* As turn_begin, `limit_ns` at most; `hurry`, if there is one, is called now and then meanwhile. False: it is not our
 * turn. */
bool turn_begin_within(struct turn *turn, int64_t limit_ns, void (*hurry)(void));
void turn_end(struct turn *turn);
/* In a forked child: there are no turns any more. */
void turn_kill(struct turn *turn);

static inline void turn_leave(struct turn **begun) {
    if (*begun != NULL) {
        turn_end(*begun);
    }
}
/* Until the end of the block. */
#define TURN(whose) \
    __attribute__((cleanup(turn_leave), unused)) struct turn *turn_begun = turn_begin(whose) ? (whose) : NULL

#endif
