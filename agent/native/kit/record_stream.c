/* See record_stream.h.
 *
 * Theory of operation
 *   All threads share one buffer of the arena. `cursor` holds its index and the bytes taken; a thread takes its bytes
 *   by compare-and-swap, writes them and adds them to `written`. A thread that finds the buffer full lends the next one
 *   and marks the old one `sealed` with the bytes taken; the collector's thread also seals periodically. A sealed
 *   buffer is complete once as many bytes are written as were taken: the collector's thread checks, no thread waits.
 *
 * Threads: stream_reserve, stream_commit and stream_drop run on every thread of the program that writes a record;
 *   stream_seal and stream_collect on the collector's thread; the rest on the agent's.
 * Blocks: never: no lock, no allocation, one futex wake when a buffer is full.
 */
#include "kit/record_stream.h"

#include <stdlib.h>

bool stream_init(struct stream *stream, uint32_t buffers, struct wake *work) {
    stream->sealed = calloc(buffers, sizeof *stream->sealed);
    stream->written = calloc(buffers, sizeof *stream->written);
    stream->cursor = STREAM_CURSOR(STREAM_NO_BUFFER, 0);
    stream->dropped = 0;
    stream->work = work;
    stream->open = 1;
    return stream->sealed != NULL && stream->written != NULL;
}

void stream_free(struct stream *stream) {
    free(stream->sealed);
    free(stream->written);
    stream->sealed = NULL;
    stream->written = NULL;
}

void stream_close(struct stream *stream) { __atomic_store_n(&stream->open, 0, __ATOMIC_SEQ_CST); }

void stream_seal_one(struct stream *stream, uint32_t index, uint32_t taken) {
    __atomic_store_n(&stream->sealed[index], taken, __ATOMIC_RELEASE);
    wake_post(stream->work);
}

void stream_seal(struct stream *stream) {
    uint64_t cursor = __atomic_load_n(&stream->cursor, __ATOMIC_ACQUIRE);
    while (STREAM_INDEX(cursor) != STREAM_NO_BUFFER) {
        if (__atomic_compare_exchange_n(&stream->cursor, &cursor, STREAM_CURSOR(STREAM_NO_BUFFER, 0), false,
                                        __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            __atomic_store_n(&stream->sealed[STREAM_INDEX(cursor)], STREAM_TAKEN(cursor), __ATOMIC_RELEASE);
            return;
        }
    }
}

bool stream_collect(struct stream *stream, struct arena *arena) {
    bool waiting = false;
    for (uint32_t i = 0; i < arena->fixed.buffer_count; i++) {
        const uint32_t taken = __atomic_load_n(&stream->sealed[i], __ATOMIC_ACQUIRE);
        if (taken == 0) {
            continue;
        }
        if (__atomic_load_n(&stream->written[i], __ATOMIC_ACQUIRE) != taken) {
            waiting = true;
            continue;
        }
        __atomic_store_n(&stream->written[i], 0, __ATOMIC_RELAXED);
        __atomic_store_n(&stream->sealed[i], 0, __ATOMIC_RELAXED);
        __atomic_store_n(arena_buffer_word(arena, i, ARENA_BUFFER_VALID_BYTES), taken, __ATOMIC_RELAXED);
        arena_set_state(arena, i, ARENA_COMPLETED);
    }
    arena_add(arena, ARENA_DROPPED, __atomic_exchange_n(&stream->dropped, 0, __ATOMIC_RELAXED));
    return waiting;
}
