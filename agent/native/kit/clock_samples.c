/* See clock_samples.h.
 *
 * CUPTI's own times are CLOCK_REALTIME. But once torch's profiler has been used in a process, its timestamp callback is
 * registered with CUPTI for the life of the process: from then on all of CUPTI's records hold the processor's time
 * stamp counter (on x86-64; CLOCK_MONOTONIC elsewhere). Removing the callback would spoil the program's next profile.
 * So the daemon finds out which clock a record uses and translates it with two samples of all of them.
 *
 * A vendor with its own clock has a function that reads it (kit/vendor.h). All pairs are kept, since CLOCK_REALTIME may
 * be set or slewed during a recording: 24 bytes of the string table for each flush.
 *
 * Threads: the agent's when recording begins, then the collector's.
 * Blocks: never.
 */
#define _GNU_SOURCE
#include "kit/clock_samples.h"

#include <time.h>
#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#include "common/wake.h"

#define TRIES 16 /* the try in which the thread was not preempted counts */

static uint64_t ticks(void) {
#if defined(__x86_64__)
    return __rdtsc();
#else
    return 0;
#endif
}

static void sample(const struct arena *arena, size_t at) {
    uint64_t best[3] = {0, 0, 0};
    int64_t shortest = INT64_MAX;
    for (int i = 0; i < TRIES; i++) {
        const int64_t before = clock_ns(CLOCK_REALTIME);
        const uint64_t counter = ticks();
        const int64_t monotonic = clock_ns(CLOCK_MONOTONIC);
        const int64_t took = clock_ns(CLOCK_REALTIME) - before;
        if (took >= 0 && took < shortest) {
            shortest = took;
            best[0] = (uint64_t)(before + took / 2);
            best[1] = counter;
            best[2] = (uint64_t)monotonic;
        }
    }
    for (size_t i = 0; i < 3; i++) {
        arena_store(arena, at + i * sizeof(uint64_t), best[i]);
    }
}

void clocks_sample(const struct arena *arena) { sample(arena, ARENA_CLOCKS_LAST); }

void clocks_begin(const struct arena *arena) {
    sample(arena, ARENA_CLOCKS_FIRST);
    sample(arena, ARENA_CLOCKS_LAST);
}

void clocks_add_pair(struct arena *arena, uint64_t (*read_clock)(void)) {
    uint64_t unix_ns = 0, best = 0;
    int64_t shortest = INT64_MAX;
    for (int i = 0; i < TRIES; i++) {
        const int64_t before = clock_ns(CLOCK_REALTIME);
        const uint64_t theirs = read_clock();
        const int64_t took = clock_ns(CLOCK_REALTIME) - before;
        if (took >= 0 && took < shortest) {
            shortest = took;
            unix_ns = (uint64_t)(before + took / 2);
            best = theirs;
        }
    }
    if (shortest != INT64_MAX) { /* otherwise the clock was set back each time */
        (void)arena_add_string(arena, unix_ns, ARENA_SPACE_CLOCK_PAIR, (const char *)&best, sizeof best);
    }
}
