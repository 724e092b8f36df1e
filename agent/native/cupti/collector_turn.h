/* Whose turn it is to use the collector: the agent's thread, or that of somebody who is given way to. */
#ifndef KINETO_TURN_H
#define KINETO_TURN_H

#include <stdbool.h>
#include <stdint.h>

/* Waits. What this thread asks of CUPTI until turn_end is ours. May be nested. False in a forked child. */
bool turn_begin(void);
/* As turn_begin, `limit_ns` at most; `hurry` is called now and then meanwhile. False: it is not our turn. */
bool turn_begin_within(int64_t limit_ns, void (*hurry)(void));
void turn_end(void);
/* In a forked child: there are no turns any more. */
void turn_kill(void);

static inline void turn_leave(const bool *begun) {
    if (*begun) {
        turn_end();
    }
}
/* Until the end of the block. */
#define TURN __attribute__((cleanup(turn_leave), unused)) const bool turn_begun = turn_begin()

#endif
