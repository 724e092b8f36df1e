/* Lending buffers to a vendor's library: the two callbacks that run on the target's own threads.
 *
 * Theory of operation
 *   The library asks for a buffer on the thread that needs one (often inside a kernel launch) and returns it full on a
 *   thread of its own, or inside a flush. Both callbacks are wait-free except for a bounded scan: no lock, no
 *   allocation, no system call except the futex wake for a returned buffer (one per 4 MiB of records).
 *
 *   The lowest FREE buffer is lent first: its memory is already mapped and probably still in a cache.
 *
 *   Libraries pass no argument to these callbacks, so each collector has its own pair of them (collector_slots.c).
 *   `users` counts the callbacks that are inside; pool_close() clears the pointer to the arena and waits until it is 0,
 *   after which the arena may be unmapped. (Sequentially consistent on both sides: each must see the other's store.)
 *
 *   A library may keep a buffer beyond the end of a recording and return it in the next one. Such a stray belongs to
 *   an arena that is retired (collector.c); the collector's thread copies its records over.
 *
 *   When no buffer is FREE, a library that then drops and counts records (libcupti of CUDA 12.9 and later) is declined.
 *   Others get a spill buffer, whose records are only counted. If even these run out, a library that must have a buffer
 *   (PTI) gets one that is lent many times over: its contents are never read.
 *
 * Threads: the two callbacks run on threads of the program and of the library; pool_take_*, pool_free_spill on the
 *   collector's thread; the rest on the agent's.
 * Blocks: the callbacks never do. pool_close yields the processor until the callbacks that are inside have left.
 */
#define _GNU_SOURCE
#include "kit/buffer_pool.h"

#include <errno.h>
#include <sched.h>
#include <sys/mman.h>

int pool_prepare_spill(struct pool *pool) {
    if (pool->spill != NULL) {
        return 0;
    }
    void *memory = mmap(NULL, (SPILL_BUFFERS + 1) * (size_t)SPILL_BUFFER_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        return errno;
    }
    pool->spill = memory; /* kept for the life of the process: the library may hold one at any time */
    return 0;
}

void pool_open(struct pool *pool, struct arena *arena, struct wake *work, enum kit_when_full when_full) {
    pool->work = work;
    __atomic_store_n(&pool->when_full, when_full, __ATOMIC_RELAXED);
    __atomic_store_n(&pool->uncounted, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&pool->lending, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&pool->arena, arena, __ATOMIC_SEQ_CST);
}

void pool_stop_lending(struct pool *pool) { __atomic_store_n(&pool->lending, 0, __ATOMIC_SEQ_CST); }

void pool_close(struct pool *pool) {
    pool_stop_lending(pool);
    __atomic_store_n(&pool->arena, NULL, __ATOMIC_SEQ_CST);
    while (!pool_is_idle(pool)) {
        sched_yield();
    }
}

void pool_kill(struct pool *pool) { __atomic_store_n(&pool->dead, 1, __ATOMIC_SEQ_CST); }

struct arena *pool_enter(struct pool *pool) {
    __atomic_fetch_add(&pool->users, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool->dead, __ATOMIC_RELAXED)) {
        return NULL;
    }
    return __atomic_load_n(&pool->arena, __ATOMIC_SEQ_CST);
}

void pool_leave(struct pool *pool) { __atomic_fetch_sub(&pool->users, 1, __ATOMIC_SEQ_CST); }

bool pool_is_idle(const struct pool *pool) { return __atomic_load_n(&pool->users, __ATOMIC_SEQ_CST) == 0; }

static bool take(uint32_t *state) {
    uint32_t expected = ARENA_FREE;
    return __atomic_load_n(state, __ATOMIC_RELAXED) == ARENA_FREE &&
           __atomic_compare_exchange_n(state, &expected, ARENA_LOANED, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

int64_t pool_lend(struct pool *pool, struct arena *arena) {
    if (!__atomic_load_n(&pool->lending, __ATOMIC_RELAXED)) {
        return -1;
    }
    for (uint32_t i = 0; i < arena->fixed.buffer_count; i++) {
        if (take(arena_state(arena, i))) {
            return i;
        }
    }
    return -1;
}

static uint8_t *lend_spill(struct pool *pool) {
    for (uint32_t i = 0; pool->spill != NULL && i < SPILL_BUFFERS; i++) {
        if (take(&pool->spill_state[i])) {
            return pool->spill + (size_t)i * SPILL_BUFFER_BYTES;
        }
    }
    return NULL;
}

static uint8_t *shared_spill(const struct pool *pool) {
    return pool->spill + SPILL_BUFFERS * (size_t)SPILL_BUFFER_BYTES;
}

void pool_request(struct pool *pool, uint8_t **buffer, size_t *size) {
    struct arena *arena = pool_enter(pool);
    const uint32_t when_full = __atomic_load_n(&pool->when_full, __ATOMIC_RELAXED);
    *buffer = NULL;
    if (arena != NULL) {
        const int64_t index = pool_lend(pool, arena);
        *buffer = index < 0 ? NULL : arena_buffer(arena, (uint32_t)index);
        *size = arena->fixed.buffer_bytes;
    }
    if (*buffer == NULL && when_full != KIT_FULL_DECLINES) {
        *buffer = lend_spill(pool);
        *size = SPILL_BUFFER_BYTES;
    }
    if (*buffer == NULL && when_full == KIT_FULL_NEVER_DECLINES && pool->spill != NULL) {
        *buffer = shared_spill(pool);
    }
    if (*buffer == NULL) {
        *size = 0;
    }
    pool_leave(pool);
}

static bool return_spill(struct pool *pool, const uint8_t *buffer, size_t valid) {
    if (pool->spill == NULL || buffer < pool->spill || buffer > shared_spill(pool)) {
        return false;
    }
    if (buffer == shared_spill(pool)) {
        __atomic_fetch_add(&pool->uncounted, valid > 0, __ATOMIC_RELAXED);
        return true;
    }
    const size_t index = (size_t)(buffer - pool->spill) / SPILL_BUFFER_BYTES;
    pool->spill_valid[index] = valid;
    __atomic_store_n(&pool->spill_state[index], ARENA_COMPLETED, __ATOMIC_RELEASE);
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

/* Takes a buffer of an arena that was closed while the library still held it. In practice the library holds no more of
 * them than there are slots (CUPTI keeps one or two); the rest would stay lent. */
static void return_stray(struct pool *pool, uint8_t *buffer, size_t valid) {
    for (uint32_t i = 0; i < STRAYS_MOST; i++) {
        if (take(&pool->stray_state[i])) {
            pool->stray[i] = buffer;
            pool->stray_valid[i] = valid;
            __atomic_store_n(&pool->stray_state[i], ARENA_COMPLETED, __ATOMIC_RELEASE);
            return;
        }
    }
}

void pool_return(struct pool *pool, uint8_t *buffer, size_t valid) {
    struct arena *arena = pool_enter(pool);
    if (buffer != NULL && !__atomic_load_n(&pool->dead, __ATOMIC_RELAXED)) {
        if (!return_spill(pool, buffer, valid) && (arena == NULL || !return_to_arena(arena, buffer, valid))) {
            return_stray(pool, buffer, valid);
        }
        if (arena != NULL) {
            wake_post(pool->work);
        }
    }
    pool_leave(pool);
}

uint8_t *pool_take_stray(struct pool *pool, size_t *valid) {
    for (uint32_t i = 0; i < STRAYS_MOST; i++) {
        if (__atomic_load_n(&pool->stray_state[i], __ATOMIC_ACQUIRE) == ARENA_COMPLETED) {
            uint8_t *buffer = pool->stray[i];
            *valid = pool->stray_valid[i];
            __atomic_store_n(&pool->stray_state[i], ARENA_FREE, __ATOMIC_RELEASE);
            return buffer;
        }
    }
    return NULL;
}

void pool_drop_strays(struct pool *pool) {
    size_t valid;
    while (pool_take_stray(pool, &valid) != NULL) {
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

uint8_t *pool_take_spill(struct pool *pool, size_t *valid) {
    for (uint32_t i = 0; pool->spill != NULL && i < SPILL_BUFFERS; i++) {
        if (__atomic_load_n(&pool->spill_state[i], __ATOMIC_ACQUIRE) == ARENA_COMPLETED) {
            *valid = pool->spill_valid[i];
            return pool->spill + (size_t)i * SPILL_BUFFER_BYTES;
        }
    }
    return NULL;
}

void pool_free_spill(struct pool *pool, uint8_t *buffer) {
    const size_t index = (size_t)(buffer - pool->spill) / SPILL_BUFFER_BYTES;
    __atomic_store_n(&pool->spill_state[index], ARENA_FREE, __ATOMIC_RELEASE);
}
