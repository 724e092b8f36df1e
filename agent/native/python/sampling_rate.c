/* See sampling_rate.h.
 *
 * A sampler with a fixed period would see a program that does the same thing every 5 or 10 ms in the same place again
 * and again. With one tick at a random moment of each period every moment is as likely as any other, and two ticks are
 * less than two periods apart.
 *
 * Threads: the sampler's.
 * Blocks: never.
 */
#define _GNU_SOURCE
#include "python/sampling_rate.h"

#include <time.h>

#include "common/wake.h"

#define NS_PER_S 1000000000LL
#define BUDGET_PERIOD_NS (NS_PER_S / 2)
#define PPM 1000000LL

void rate_begin(struct stack_rate *rate, uint32_t hz, uint32_t max_load_ppm) {
    const int64_t now = clock_ns(CLOCK_MONOTONIC);
    *rate = (struct stack_rate){.wanted_ns = NS_PER_S / hz,
                                .period_ns = NS_PER_S / hz,
                                .longest_ns = NS_PER_S / hz,
                                .max_load_ppm = max_load_ppm,
                                .slot_ns = now,
                                .since_ns = now,
                                .random = (uint64_t)now | 1};
}

void rate_spent(struct stack_rate *rate, int64_t cost_ns) {
    const int64_t now = clock_ns(CLOCK_MONOTONIC);
    rate->ticks++;
    rate->cost_ns += cost_ns;
    if (now - rate->since_ns < BUDGET_PERIOD_NS) {
        return;
    }
    const int64_t mean = rate->cost_ns / rate->ticks;
    if (rate->period_ns > rate->wanted_ns || rate->cost_ns > (now - rate->since_ns) / PPM * rate->max_load_ppm) {
        const int64_t needed = mean * PPM / rate->max_load_ppm;
        rate->period_ns = needed > rate->wanted_ns ? needed : rate->wanted_ns;
    }
    if (rate->period_ns > rate->longest_ns) {
        rate->longest_ns = rate->period_ns;
        rate->longest_cost_ns = mean;
    }
    rate->since_ns = now;
    rate->ticks = rate->cost_ns = 0;
}

static uint64_t next_random(struct stack_rate *rate) { /* xorshift64 */
    rate->random ^= rate->random << 13;
    rate->random ^= rate->random >> 7;
    rate->random ^= rate->random << 17;
    return rate->random;
}

int64_t rate_next(struct stack_rate *rate) {
    const int64_t now = clock_ns(CLOCK_MONOTONIC);
    rate->slot_ns += rate->period_ns;
    if (now >= rate->slot_ns + rate->period_ns) {
        const int64_t late = (now - rate->slot_ns) / rate->period_ns;
        rate->missed += (uint64_t)late;
        rate->slot_ns += late * rate->period_ns;
    }
    return rate->slot_ns + (int64_t)(next_random(rate) % (uint64_t)rate->period_ns);
}
