/* Records that the program's threads write into the arena themselves: pushed records, CUDA calls. */
#ifndef KINETO_KIT_RECORD_STREAM_H
#define KINETO_KIT_RECORD_STREAM_H

#include <stdbool.h>
#include <stdint.h>

#include "common/arena.h"
#include "common/wake.h"
#include "kit/buffer_pool.h"

#define STREAM_NO_BUFFER UINT32_MAX
#define STREAM_CURSOR(index, taken) ((uint64_t)(index) << 32 | (uint32_t)(taken))
#define STREAM_INDEX(cursor) ((uint32_t)((cursor) >> 32))
#define STREAM_TAKEN(cursor) ((uint32_t)(cursor))

struct stream {
    uint64_t cursor;
    uint64_t dropped;
    uint32_t *sealed;  /* by buffer: bytes taken when it was sealed, 0: not sealed */
    uint32_t *written; /* by buffer */
    struct wake *work;
    uint32_t open; /* pushed records are accepted */
};

/* Allocates the state of `buffers` buffers, open; `work` is posted when one is full. False if there is no memory. */
bool stream_init(struct stream *stream, uint32_t buffers, struct wake *work);
void stream_free(struct stream *stream);
/* Pushed records that begin after this are not accepted. */
void stream_close(struct stream *stream);
static inline bool stream_is_open(const struct stream *stream) {
    return __atomic_load_n(&stream->open, __ATOMIC_SEQ_CST) != 0;
}
/* Seals a full buffer: number `index`, with `taken` bytes. */
void stream_seal_one(struct stream *stream, uint32_t index, uint32_t taken);

/* Reserves `bytes`, at most a buffer's size. Returns the address, or NULL when no buffer is free; *index is the buffer,
 * for stream_commit. Call between pool_enter, which returned `arena`, and pool_leave. */
static inline uint8_t *stream_reserve(struct stream *stream, struct pool *pool, struct arena *arena, uint32_t bytes,
                                      uint32_t *index) {
    uint64_t cursor = __atomic_load_n(&stream->cursor, __ATOMIC_ACQUIRE);
    for (;;) {
        *index = STREAM_INDEX(cursor);
        const uint32_t taken = STREAM_TAKEN(cursor);
        if (*index != STREAM_NO_BUFFER && taken + bytes <= arena->fixed.buffer_bytes) {
            if (__atomic_compare_exchange_n(&stream->cursor, &cursor, cursor + bytes, false, __ATOMIC_ACQ_REL,
                                            __ATOMIC_ACQUIRE)) {
                return arena_buffer(arena, *index) + taken;
            }
            continue;
        }
        const int64_t next = pool_lend(pool, arena);
        if (next < 0) { /* but another thread may have taken the last one */
            const uint64_t before = cursor;
            cursor = __atomic_load_n(&stream->cursor, __ATOMIC_ACQUIRE);
            if (cursor != before) {
                continue;
            }
            return NULL;
        }
        if (__atomic_compare_exchange_n(&stream->cursor, &cursor, STREAM_CURSOR(next, bytes), false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE)) {
            if (*index != STREAM_NO_BUFFER) {
                stream_seal_one(stream, *index, taken);
            }
            *index = (uint32_t)next;
            return arena_buffer(arena, *index);
        }
        arena_set_state(arena, (uint32_t)next, ARENA_FREE); /* another thread was faster */
    }
}

/* All reserved `bytes` are written. */
static inline void stream_commit(struct stream *stream, uint32_t index, uint32_t bytes) {
    __atomic_fetch_add(&stream->written[index], bytes, __ATOMIC_RELEASE);
}

static inline void stream_drop(struct stream *stream, uint64_t records) {
    __atomic_fetch_add(&stream->dropped, records, __ATOMIC_RELAXED);
}

/* On the collector's thread: seals the buffer in use, so that stream_collect finds it. */
void stream_seal(struct stream *stream);
/* Makes sealed buffers COMPLETED and counts dropped records. Returns true if one still waits for a writer. */
bool stream_collect(struct stream *stream, struct arena *arena);

#endif
