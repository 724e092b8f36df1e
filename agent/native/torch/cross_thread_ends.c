/* See cross_thread_ends.h. A ring that is written and read without a lock; when it is full, the oldest entries are
 * dropped.
 *
 * An end belongs to the RecordFunction at that address whose op began before it; the address may be used again later.
 *
 * Threads: any thread of the program that begins or ends an op.
 * Blocks: never.
 */
#include "torch/cross_thread_ends.h"

#include <stdbool.h>
#include <stddef.h>

#define ENTRIES 256u

static struct {
    uint64_t taken;
    uint64_t count; /* how many of the taken slots are filled */
    struct {
        const void *function; /* NULL: empty or taken */
        uint64_t end;
    } entries[ENTRIES];
} ring;

void ops_elsewhere_reset(void) {
    for (uint32_t i = 0; i < ENTRIES; i++) {
        __atomic_store_n(&ring.entries[i].function, NULL, __ATOMIC_RELAXED);
    }
    __atomic_store_n(&ring.taken, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&ring.count, 0, __ATOMIC_RELEASE);
}

void ops_elsewhere_add(const void *function, uint64_t end_ns) {
    const uint32_t i = (uint32_t)(__atomic_fetch_add(&ring.taken, 1, __ATOMIC_RELAXED) % ENTRIES);
    __atomic_store_n(&ring.entries[i].end, end_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&ring.entries[i].function, function, __ATOMIC_RELEASE);
    __atomic_fetch_add(&ring.count, 1, __ATOMIC_ACQ_REL);
}

uint64_t ops_elsewhere_count(void) { return __atomic_load_n(&ring.count, __ATOMIC_ACQUIRE); }

uint64_t ops_elsewhere_take(const void *function, uint64_t start_ns) {
    for (uint32_t i = 0; i < ENTRIES; i++) {
        const void *found = __atomic_load_n(&ring.entries[i].function, __ATOMIC_ACQUIRE);
        const uint64_t end = __atomic_load_n(&ring.entries[i].end, __ATOMIC_RELAXED);
        if (found == function && end >= start_ns &&
            __atomic_compare_exchange_n(&ring.entries[i].function, &found, NULL, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_RELAXED)) {
            return end;
        }
    }
    return 0;
}
