/* A wake-up that never blocks its sender: a counter and a futex. */
#ifndef KINETO_WAKE_H
#define KINETO_WAKE_H

#include <stdbool.h>
#include <stdint.h>

struct wake {
    uint32_t posts;
};

/* Wakes all waiting threads. Safe in vendor callbacks: one non-blocking system call, no lock, no allocation. */
void wake_post(struct wake *wake);
uint32_t wake_seen(const struct wake *wake);
/* Returns once there was a post after `seen` was read, or after `limit_ns` (monotonic), or spuriously. */
void wake_wait(struct wake *wake, uint32_t seen, int64_t limit_ns);

/* Waits, `limit_ns` at most, until `word` is `value`; the thread that sets it posts afterwards. False: timed out. */
bool wake_await(struct wake *wake, const uint32_t *word, uint32_t value, int64_t limit_ns);

/* Returns the time in ns of a clock (clockid_t): CLOCK_MONOTONIC, CLOCK_REALTIME or CLOCK_THREAD_CPUTIME_ID. */
int64_t clock_ns(int clock);

/* The CPU time of a thread of this process. False: it has ended. */
bool thread_cpu_ns(uint32_t tid, uint64_t *cpu_ns);

#endif
