/* Arenas of past recordings of which the library still holds a buffer.
 *
 * An arena to which the library may still write is not unmapped: its memory is freed except for the buffers in
 * question, and the mapping stays until a detach proves that the library has released it.
 *
 * Threads: retired_add and retired_free run on the agent's; retired_release on the collector's; retired_forked in a
 *   forked child.
 * Blocks: never.
 */
#include "kit/retired_arenas.h"

#include <stdlib.h>
#include <unistd.h>

void retired_add(struct retired *retired, struct arena *arena) {
    arena_close(arena);
    arena_discard(arena);
    arena->next = retired->first;
    retired->first = arena;
}

void retired_release(const struct retired *retired, const uint8_t *buffer) {
    for (struct arena *arena = retired->first; arena != NULL; arena = arena->next) {
        if (buffer >= arena_buffer(arena, 0) && buffer < arena->base + arena->fixed.total_bytes) {
            const uint64_t offset = (uint64_t)(buffer - arena_buffer(arena, 0));
            arena_set_state(arena, (uint32_t)(offset / arena->fixed.buffer_bytes), ARENA_FREE);
            arena_discard(arena);
            return;
        }
    }
}

void retired_free(struct retired *retired) {
    while (retired->first != NULL) {
        struct arena *arena = retired->first;
        retired->first = arena->next;
        arena_destroy(arena);
        free(arena);
    }
}

void retired_forked(const struct retired *retired) {
    for (struct arena *arena = retired->first; arena != NULL; arena = arena->next) {
        arena_forked(arena);
    }
}
