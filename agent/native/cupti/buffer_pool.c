/* Lending buffers to CUPTI: the two callbacks that run on the target's own threads.
 *
 * Theory of operation
 *   CUPTI asks for a buffer on whatever thread needs one (often inside a kernel launch) and returns it full on
 *   a thread of its own, or inside a flush. Both callbacks are wait-free but for a bounded scan: no lock, no
 *   allocation, no system call except the futex wake for a returned buffer (one per 4 MiB of records).
 *
 *   The lowest FREE buffer is lent first: its memory is already there and probably still in a cache.
 *
 *   CUPTI keeps no argument for its callbacks, so the arena is found through one global pointer. `users`
 *   counts the callbacks that are inside; pool_close() clears the pointer and waits until it is 0, after which
 *   the arena may be unmapped. (Sequentially consistent on both sides: each must see the other's store.)
 *
 *   CUPTI may keep a buffer beyond the end of a recording and return it in the next one. Such a stray belongs to
 *   an arena that is retired (collector.c); the collector's thread copies its records over.
 *
 *   When no buffer is FREE, libcupti of CUDA 12.9 and later may be declined: it drops records and counts them.
 *   Before that it gets a spill buffer, whose records are only counted.
 *
 * Threads: the two callbacks run on threads of the program and of CUPTI; pool_take_*, pool_free_spill on the
 *   collector's thread; the rest on the agent's.
 * Blocks: nothing does in a callback. pool_close yields the processor until the callbacks that are inside have left.
 */
#define _GNU_SOURCE
#include "cupti/buffer_pool.h"

#include <errno.h>
#include <sched.h>
#include <sys/mman.h>

static struct {
    struct arena *arena;
    struct wake *work;
    uint32_t users;
    uint32_t lending;
    uint32_t may_decline;
    uint32_t dead;
    uint8_t *spill;
    uint32_t spill_state[SPILL_BUFFERS]; /* ARENA_FREE, ARENA_LOANED, ARENA_COMPLETED */
    size_t spill_valid[SPILL_BUFFERS];
    uint32_t stray_state[STRAYS_MOST];
    uint8_t *stray[STRAYS_MOST];
    size_t stray_valid[STRAYS_MOST];
} pool;

int pool_prepare_spill(void) {
    if (pool.spill != NULL) {
        return 0;
    }
    void *memory = mmap(NULL, SPILL_BUFFERS * (size_t)SPILL_BUFFER_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        return errno;
    }
    pool.spill = memory; /* kept for the life of the process: CUPTI may hold one at any time */
    return 0;
}

void pool_open(struct arena *arena, struct wake *work, bool may_decline) {
    pool.work = work;
    __atomic_store_n(&pool.may_decline, may_decline, __ATOMIC_RELAXED);
    __atomic_store_n(&pool.lending, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&pool.arena, arena, __ATOMIC_SEQ_CST);
}

void pool_stop_lending(void) { __atomic_store_n(&pool.lending, 0, __ATOMIC_SEQ_CST); }

void pool_close(void) {
    pool_stop_lending();
    __atomic_store_n(&pool.arena, NULL, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&pool.users, __ATOMIC_SEQ_CST) != 0) {
        sched_yield();
    }
}

void pool_kill(void) { __atomic_store_n(&pool.dead, 1, __ATOMIC_SEQ_CST); }

struct arena *pool_enter(void) {
    __atomic_fetch_add(&pool.users, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool.dead, __ATOMIC_RELAXED)) {
        return NULL;
    }
    return __atomic_load_n(&pool.arena, __ATOMIC_SEQ_CST);
}

void pool_leave(void) { __atomic_fetch_sub(&pool.users, 1, __ATOMIC_SEQ_CST); }

static bool take(uint32_t *state) {
    uint32_t expected = ARENA_FREE;
    return __atomic_load_n(state, __ATOMIC_RELAXED) == ARENA_FREE &&
           __atomic_compare_exchange_n(state, &expected, ARENA_LOANED, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

int64_t pool_lend(struct arena *arena) {
    if (!__atomic_load_n(&pool.lending, __ATOMIC_RELAXED)) {
        return -1;
    }
    for (uint32_t i = 0; i < arena->fixed.buffer_count; i++) {
        if (take(arena_state(arena, i))) {
            return i;
        }
    }
    return -1;
}

static uint8_t *lend_spill(void) {
    for (uint32_t i = 0; pool.spill != NULL && i < SPILL_BUFFERS; i++) {
        if (take(&pool.spill_state[i])) {
            return pool.spill + (size_t)i * SPILL_BUFFER_BYTES;
        }
    }
    return NULL;
}

void pool_buffer_requested(uint8_t **buffer, size_t *size, size_t *max_records) {
    struct arena *arena = pool_enter();
    *buffer = NULL;
    *size = 0;
    *max_records = 0; /* as many as fit */
    if (arena != NULL) {
        const int64_t index = pool_lend(arena);
        *buffer = index < 0 ? NULL : arena_buffer(arena, (uint32_t)index);
        *size = arena->fixed.buffer_bytes;
    }
    if (*buffer == NULL && !__atomic_load_n(&pool.may_decline, __ATOMIC_RELAXED)) {
        *buffer = lend_spill();
        *size = SPILL_BUFFER_BYTES;
    }
    if (*buffer == NULL) {
        *size = 0;
    }
    pool_leave();
}

static bool return_spill(const uint8_t *buffer, size_t valid) {
    if (pool.spill == NULL || buffer < pool.spill || buffer >= pool.spill + SPILL_BUFFERS * SPILL_BUFFER_BYTES) {
        return false;
    }
    const size_t index = (size_t)(buffer - pool.spill) / SPILL_BUFFER_BYTES;
    pool.spill_valid[index] = valid;
    __atomic_store_n(&pool.spill_state[index], ARENA_COMPLETED, __ATOMIC_RELEASE);
    return true;
}

static bool return_to_arena(struct arena *arena, const uint8_t *buffer, size_t valid) {
    const uint8_t *first = arena_buffer(arena, 0);
    if (buffer < first || buffer >= arena->base + arena->fixed.total_bytes) {
        return false;
    }
    const uint32_t index = (uint32_t)((uint64_t)(buffer - first) / arena->fixed.buffer_bytes);
    const uint64_t most = arena->fixed.buffer_bytes;
    __atomic_store_n(arena_buffer_word(arena, index, ARENA_BUFFER_VALID_BYTES), valid < most ? valid : most,
                     __ATOMIC_RELAXED);
    arena_set_state(arena, index, ARENA_COMPLETED);
    return true;
}

/* Of an arena that was closed while CUPTI still held it. CUPTI can hold no more of them than there are slots
 * for in practice (it keeps one or two); the rest would stay lent. */
static void return_stray(uint8_t *buffer, size_t valid) {
    for (uint32_t i = 0; i < STRAYS_MOST; i++) {
        if (take(&pool.stray_state[i])) {
            pool.stray[i] = buffer;
            pool.stray_valid[i] = valid;
            __atomic_store_n(&pool.stray_state[i], ARENA_COMPLETED, __ATOMIC_RELEASE);
            return;
        }
    }
}

void pool_buffer_completed(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
    (void)context;
    (void)stream;
    (void)size;
    struct arena *arena = pool_enter();
    if (buffer != NULL && !__atomic_load_n(&pool.dead, __ATOMIC_RELAXED)) {
        if (!return_spill(buffer, valid) && (arena == NULL || !return_to_arena(arena, buffer, valid))) {
            return_stray(buffer, valid);
        }
        if (arena != NULL) {
            wake_post(pool.work);
        }
    }
    pool_leave();
}

uint8_t *pool_take_stray(size_t *valid) {
    for (uint32_t i = 0; i < STRAYS_MOST; i++) {
        if (__atomic_load_n(&pool.stray_state[i], __ATOMIC_ACQUIRE) == ARENA_COMPLETED) {
            uint8_t *buffer = pool.stray[i];
            *valid = pool.stray_valid[i];
            __atomic_store_n(&pool.stray_state[i], ARENA_FREE, __ATOMIC_RELEASE);
            return buffer;
        }
    }
    return NULL;
}

void pool_drop_strays(void) {
    size_t valid;
    while (pool_take_stray(&valid) != NULL) {
    }
}

struct pool_usage pool_usage(const struct arena *arena) {
    struct pool_usage usage = {0, 0, 0};
    for (uint32_t i = 0; i < arena->fixed.buffer_count; i++) {
        const uint32_t state = arena_load_state(arena, i);
        usage.free += state == ARENA_FREE;
        usage.loaned += state == ARENA_LOANED;
        if (state != ARENA_FREE) {
            usage.top = i + 1;
        }
    }
    return usage;
}

uint8_t *pool_take_spill(size_t *valid) {
    for (uint32_t i = 0; pool.spill != NULL && i < SPILL_BUFFERS; i++) {
        if (__atomic_load_n(&pool.spill_state[i], __ATOMIC_ACQUIRE) == ARENA_COMPLETED) {
            *valid = pool.spill_valid[i];
            return pool.spill + (size_t)i * SPILL_BUFFER_BYTES;
        }
    }
    return NULL;
}

void pool_free_spill(uint8_t *buffer) {
    const size_t index = (size_t)(buffer - pool.spill) / SPILL_BUFFER_BYTES;
    __atomic_store_n(&pool.spill_state[index], ARENA_FREE, __ATOMIC_RELEASE);
}
