/* Lending buffers to CUPTI: the two callbacks that run on the target's own threads. */
#ifndef KINETO_POOL_H
#define KINETO_POOL_H

#include "common/arena.h"
#include "cupti/cupti_api.h"
#include "common/wake.h"

#define SPILL_BUFFERS 8u
#define SPILL_BUFFER_BYTES (1u << 20)
#define STRAYS_MOST 64u

/* Makes the spill buffers for a CUPTI that cannot be declined. Returns 0 or an errno. */
int pool_prepare_spill(void);
/* From now on CUPTI gets buffers of `arena`; `work` is posted when one comes back. */
void pool_open(struct arena *arena, struct wake *work, bool may_decline);
/* No buffer is lent any more, returned ones are still accepted. */
void pool_stop_lending(void);
/* Forgets the arena; on return no callback uses it any more. */
void pool_close(void);
/* In a forked child: declines everything for ever. */
void pool_kill(void);

/* How many buffers are FREE, LOANED; and one past the highest index in use. */
struct pool_usage {
    uint32_t free;
    uint32_t loaned;
    uint32_t top;
};
struct pool_usage pool_usage(const struct arena *arena);

/* The next returned spill buffer, or NULL; give it back with pool_free_spill. */
uint8_t *pool_take_spill(size_t *valid);
void pool_free_spill(uint8_t *buffer);

/* The next returned buffer of an arena that was closed while CUPTI still held it, or NULL. */
uint8_t *pool_take_stray(size_t *valid);
/* Forgets those that have come back so far: their arenas are about to be unmapped. */
void pool_drop_strays(void);
/* For callbacks: the arena, which stays mapped until pool_leave, or NULL; pool_leave is due in any case. */
struct arena *pool_enter(void);
void pool_leave(void);
/* Lends one FREE buffer to the caller: its index, or -1. */
int64_t pool_lend(struct arena *arena);

void pool_buffer_requested(uint8_t **buffer, size_t *size, size_t *max_records);
void pool_buffer_completed(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid);

#endif
