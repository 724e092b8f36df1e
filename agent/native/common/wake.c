/* See wake.h.
 *
 * Threads: any.
 * Blocks: wake_post never does: one futex wake. wake_wait and wake_await sleep until a post or their limit.
 */
#define _GNU_SOURCE
#include "common/wake.h"

#include <limits.h>
#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_S 1000000000LL
#define CPU_CLOCK_OF_THREAD 6u /* CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED */

void wake_post(struct wake *wake) {
    __atomic_fetch_add(&wake->posts, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &wake->posts, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

uint32_t wake_seen(const struct wake *wake) { return __atomic_load_n(&wake->posts, __ATOMIC_SEQ_CST); }

void wake_wait(struct wake *wake, uint32_t seen, int64_t limit_ns) {
    if (limit_ns <= 0 || wake_seen(wake) != seen) {
        return;
    }
    const struct timespec limit = {.tv_sec = limit_ns / NS_PER_S, .tv_nsec = limit_ns % NS_PER_S};
    syscall(SYS_futex, &wake->posts, FUTEX_WAIT_PRIVATE, seen, &limit, NULL, 0);
}

bool wake_await(struct wake *wake, const uint32_t *word, uint32_t value, int64_t limit_ns) {
    const int64_t deadline = clock_ns(CLOCK_MONOTONIC) + limit_ns;
    for (;;) {
        const uint32_t seen = wake_seen(wake);
        if (__atomic_load_n(word, __ATOMIC_SEQ_CST) == value) {
            return true;
        }
        const int64_t left = deadline - clock_ns(CLOCK_MONOTONIC);
        if (left <= 0) {
            return false;
        }
        wake_wait(wake, seen, left);
    }
}

int64_t clock_ns(int clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * NS_PER_S + now.tv_nsec;
}

bool thread_cpu_ns(uint32_t tid, uint64_t *cpu_ns) {
    struct timespec time;
    if (tid == 0 || clock_gettime((clockid_t)(~tid << 3 | CPU_CLOCK_OF_THREAD), &time) != 0) {
        return false;
    }
    *cpu_ns = (uint64_t)time.tv_sec * NS_PER_S + (uint64_t)time.tv_nsec;
    return true;
}
