/* Lending buffers to a vendor's library: what its two callbacks do on the target's own threads. */
#ifndef KINETO_KIT_BUFFER_POOL_H
#define KINETO_KIT_BUFFER_POOL_H

#include "common/arena.h"
#include "common/wake.h"
#include "kit/vendor.h"

#define SPILL_BUFFERS 8u
#define SPILL_BUFFER_BYTES (1u << 20)
#define STRAYS_MOST 64u

struct pool {
    struct arena *arena;
    struct wake *work;
    uint32_t users;
    uint32_t lending;
    uint32_t when_full; /* kit_when_full */
    uint32_t dead;
    uint8_t *spill;                      /* SPILL_BUFFERS, and one more that all share */
    uint32_t uncounted;                  /* returns of the shared one */
    uint32_t spill_state[SPILL_BUFFERS]; /* ARENA_FREE, ARENA_LOANED, ARENA_COMPLETED */
    size_t spill_valid[SPILL_BUFFERS];
    uint32_t stray_state[STRAYS_MOST];
    uint8_t *stray[STRAYS_MOST];
    size_t stray_valid[STRAYS_MOST];
};

/* Allocates the spill buffers for a library that cannot be declined. Returns 0 or an errno. */
int pool_prepare_spill(struct pool *pool);
/* From now on the library gets buffers of `arena`; `work` is posted when one comes back. */
void pool_open(struct pool *pool, struct arena *arena, struct wake *work, enum kit_when_full when_full);
/* Lends no more buffers, but still accepts returned ones. */
void pool_stop_lending(struct pool *pool);
/* Forgets the arena; on return no callback uses it any more. */
void pool_close(struct pool *pool);
/* In a forked child: declines everything from now on. */
void pool_kill(struct pool *pool);

/* How many buffers are FREE and LOANED, and one past the highest index in use. */
struct pool_usage {
    uint32_t free;
    uint32_t loaned;
    uint32_t top;
};
struct pool_usage pool_usage(const struct arena *arena);

/* The next returned spill buffer, or NULL; give it back with pool_free_spill. */
uint8_t *pool_take_spill(struct pool *pool, size_t *valid);
void pool_free_spill(struct pool *pool, uint8_t *buffer);

/* The next returned buffer of an arena that was closed while the library still held it, or NULL. */
uint8_t *pool_take_stray(struct pool *pool, size_t *valid);
/* Forgets those that have come back so far: their arenas are about to be unmapped. */
void pool_drop_strays(struct pool *pool);
/* For callbacks: the arena, which stays mapped until pool_leave, or NULL; pool_leave must be called in any case. */
struct arena *pool_enter(struct pool *pool);
void pool_leave(struct pool *pool);
/* Whether no callback is inside. A later one sees what was stored before. */
bool pool_is_idle(const struct pool *pool);
/* Lends one FREE buffer to the caller. Returns its index, or -1. */
int64_t pool_lend(struct pool *pool, struct arena *arena);

/* The library's callbacks. */
void pool_request(struct pool *pool, uint8_t **buffer, size_t *size);
void pool_return(struct pool *pool, uint8_t *buffer, size_t valid);

#endif
