/* Arenas of recordings that are over, of which CUPTI still holds a buffer.
 *
 * What CUPTI may still write to is not unmapped: its memory is given back but for the buffers in question, and the
 * mapping stays until a detach proves that CUPTI has let go.
 *
 * Threads: retired_add and retired_free run on the agent's; retired_release on the collector's.
 * Blocks: never.
 */
#include "cupti/retired_arenas.h"

#include <stdlib.h>
#include <unistd.h>

static struct arena *retired;

void retired_add(struct arena *arena) {
    arena_close(arena);
    arena_discard(arena);
    arena->next = retired;
    retired = arena;
}

void retired_release(const uint8_t *buffer) {
    for (struct arena *arena = retired; arena != NULL; arena = arena->next) {
        if (buffer >= arena_buffer(arena, 0) && buffer < arena->base + arena->fixed.total_bytes) {
            const uint64_t offset = (uint64_t)(buffer - arena_buffer(arena, 0));
            arena_set_state(arena, (uint32_t)(offset / arena->fixed.buffer_bytes), ARENA_FREE);
            arena_discard(arena);
            return;
        }
    }
}

void retired_free(void) {
    while (retired != NULL) {
        struct arena *arena = retired;
        retired = arena->next;
        arena_destroy(arena);
        free(arena);
    }
}
