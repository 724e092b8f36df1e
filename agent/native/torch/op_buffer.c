/* See op_buffer.h. Several threads publish at once: the header's counters are added to, not stored.
 *
 * Threads: the thread of the program whose buffer it is; the agent's once that one is known to be outside.
 * Blocks: never: one compare-and-swap for each buffer.
 */
#include "torch/op_buffer.h"

#include <string.h>

#define NO_BUFFER UINT32_MAX
#define PUBLISH_PERIOD_NS 250000000u
#define RETRY_NS 1000000u /* how long not to look for a buffer after none was FREE */

void ops_buffer_begin(struct ops_buffer *buffer, struct arena *arena) {
    *buffer = (struct ops_buffer){.arena = arena, .index = NO_BUFFER};
}

void ops_buffer_drop(const struct ops_buffer *buffer) {
    __atomic_fetch_add(arena_word(buffer->arena, ARENA_DROPPED), 1, __ATOMIC_RELAXED);
}

/* Takes the lowest FREE one: its memory is already mapped, and maybe still in a cache. */
static bool lend(struct ops_buffer *buffer, uint64_t now) {
    if (now < buffer->retry_ns) {
        return false;
    }
    for (uint32_t i = 0; i < buffer->arena->fixed.buffer_count; i++) {
        uint32_t expected = ARENA_FREE;
        uint32_t *state = arena_state(buffer->arena, i);
        if (__atomic_load_n(state, __ATOMIC_RELAXED) == ARENA_FREE &&
            __atomic_compare_exchange_n(state, &expected, ARENA_LOANED, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
            buffer->index = i;
            buffer->used = 0;
            buffer->lent_ns = now;
            return true;
        }
    }
    buffer->retry_ns = now + RETRY_NS;
    return false;
}

void ops_buffer_publish(struct ops_buffer *buffer) {
    struct arena *arena = buffer->arena;
    const uint32_t index = buffer->index;
    const uint64_t records = buffer->used / OPS_RECORD_BYTES;
    if (index == NO_BUFFER) {
        return;
    }
    buffer->index = NO_BUFFER;
    *arena_buffer_word(arena, index, ARENA_BUFFER_VALID_BYTES) = buffer->used;
    *arena_buffer_word(arena, index, ARENA_BUFFER_RECORDS) = records;
    *arena_buffer_word(arena, index, ARENA_BUFFER_SEQUENCE) = __atomic_fetch_add(arena_word(arena, ARENA_SEQUENCE), 1,
                                                                                 __ATOMIC_RELAXED);
    __atomic_fetch_add(arena_word(arena, ARENA_RECORDS), records, __ATOMIC_RELAXED);
    __atomic_fetch_add(arena_word(arena, ARENA_VALID_BYTES), buffer->used, __ATOMIC_RELAXED);
    arena_set_state(arena, index, ARENA_READY);
}

void ops_buffer_append(struct ops_buffer *buffer, const void *record, uint64_t now) {
    if (buffer->index == NO_BUFFER && !lend(buffer, now)) {
        ops_buffer_drop(buffer);
        return;
    }
    memcpy(arena_buffer(buffer->arena, buffer->index) + buffer->used, record, OPS_RECORD_BYTES);
    buffer->used += OPS_RECORD_BYTES;
    if (buffer->used + OPS_RECORD_BYTES > buffer->arena->fixed.buffer_bytes ||
        now - buffer->lent_ns > PUBLISH_PERIOD_NS) {
        ops_buffer_publish(buffer);
    }
}
