/* When to sample: at a random moment of each period, with periods long enough for the cost of a sample. */
#ifndef KINETO_STACKS_RATE_H
#define KINETO_STACKS_RATE_H

#include <stdint.h>

struct stack_rate {
    int64_t wanted_ns;
    int64_t period_ns;
    int64_t longest_ns;      /* the longest period so far */
    int64_t longest_cost_ns; /* of one tick then, on average */
    uint64_t missed;         /* periods without a tick */
    uint32_t max_load_ppm;
    int64_t slot_ns; /* when the current period began, monotonic */
    int64_t since_ns;
    int64_t cost_ns; /* since then */
    int64_t ticks;   /* since then */
    uint64_t random;
};

void rate_begin(struct stack_rate *rate, uint32_t hz, uint32_t max_load_ppm);
/* A tick took this much CPU time. */
void rate_spent(struct stack_rate *rate, int64_t cost_ns);
/* The time of the next tick, monotonic. */
int64_t rate_next(struct stack_rate *rate);

#endif
