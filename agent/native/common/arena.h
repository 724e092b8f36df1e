/* The memory that the collector writes and the daemon reads.
 *
 * The same layout as kineto_agent/protocol/arena.py and records.py, which explain it; the unit test test_arena.py
 * compares the numbers below with those modules, name by name.
 */
#ifndef KINETO_ARENA_H
#define KINETO_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ARENA_MAGIC "KINETOA1"
#define ARENA_HEADER_BYTES 4096
#define ARENA_DESCRIPTOR_BYTES 64
#define ARENA_PAGE_BYTES 4096

/* header, written while recording: byte offsets of u64 words */
#define ARENA_STRINGS_USED 64
#define ARENA_RECORDS 72
#define ARENA_DROPPED 80
#define ARENA_VALID_BYTES 88
#define ARENA_SEQUENCE 96
#define ARENA_CLOSED 112
#define ARENA_RECORD_BYTES 512
#define ARENA_RECORD_KINDS 128
#define ARENA_CLOCKS_FIRST 1024
#define ARENA_CLOCKS_LAST 1048

/* descriptor: byte offsets in its 64 bytes */
#define ARENA_STATE 0
#define ARENA_BUFFER_VALID_BYTES 8
#define ARENA_BUFFER_SEQUENCE 16
#define ARENA_BUFFER_RECORDS 24

#define ARENA_FREE 0
#define ARENA_LOANED 1
#define ARENA_COMPLETED 2
#define ARENA_READY 3

#define ARENA_SPACE_KERNEL_NAME 0
#define ARENA_SPACE_DRIVER_API 1
#define ARENA_SPACE_RUNTIME_API 2
#define ARENA_SPACE_PYTHON_CODE 3
#define ARENA_SPACE_STACK_NODE 4
#define ARENA_SPACE_THREAD_NAME 5
#define ARENA_SPACE_OP_NAME 6
#define ARENA_SPACE_OP_INPUTS 7
#define ARENA_SPACE_TORCH_THREAD 8
#define ARENA_SPACE_OP_COMMS 9
#define ARENA_SPACE_PYTHON_BYTECODE 11
#define ARENA_SPACE_CLOCK_PAIR 12

/* "torch_ops/1": op records */
#define ARENA_KIND_OP 0
#define ARENA_KIND_OP_TENSORS 1
#define ARENA_KIND_OP_COMMS 2
#define ARENA_SCOPE_FUNCTION 0
#define ARENA_SCOPE_BACKWARD_FUNCTION 1
#define ARENA_SCOPE_USER 7
#define ARENA_OP_UNFINISHED 1
#define ARENA_OP_ENDED_ELSEWHERE 2

/* "python_calls/1": the kinds of names in records; explained in kineto_agent/protocol/records.py */
#define ARENA_SPACE_PYTHON_CALL 10
#define ARENA_PYTHON_CALL_BYTES 16
#define ARENA_CALL_RETURN 0
#define ARENA_CALL_C_RETURN 1
#define ARENA_CALL_CUT 2
#define ARENA_CALL_UNKNOWN 4
#define ARENA_CALL_FIRST 16

/* header, constant after creation */
struct arena_fixed {
    char magic[8];
    uint32_t header_bytes;
    uint32_t buffer_count;
    uint64_t buffer_bytes;
    uint64_t descriptors_offset;
    uint64_t strings_offset;
    uint64_t strings_bytes;
    uint64_t buffers_offset;
    uint64_t total_bytes;
};

struct arena_string {
    uint64_t key;
    uint32_t space;
    uint32_t length;
};

/* This process's view of one arena. */
struct arena {
    int fd, first_fd;       /* the memfd, and its number before it was moved */
    uint64_t device, inode; /* of the memfd: the program may have closed the number and reused it */
    uint8_t *base;
    struct arena_fixed fixed;
    uint64_t populated; /* bytes of the buffers area that are backed by memory */
    struct arena *next; /* in the list of retired arenas */
};

/* Makes a sealed memfd and maps it. Returns 0, or an errno with *step naming the call that failed. */
int arena_create(struct arena *arena, uint32_t buffer_count, uint64_t buffer_bytes, uint64_t strings_bytes,
                 const char **step);
/* Backs the header, the start of the string table and the buffers up to `buffers_bytes` with memory. */
void arena_populate(struct arena *arena, uint64_t buffers_bytes);
/* Frees all memory except LOANED buffers; the mapping stays. */
void arena_discard(struct arena *arena);
/* Closes the descriptor only, if its number still refers to it. */
void arena_close(struct arena *arena);
void arena_destroy(struct arena *arena);
/* In a forked child, which does not have the arena (MADV_DONTFORK): closes the descriptor and maps private memory in
 * its place, so that a library that keeps writing to a lent buffer does no harm. */
void arena_forked(struct arena *arena);

/* Appends one entry and publishes it. False if the table is full. One writer at a time. */
bool arena_add_string(struct arena *arena, uint64_t key, uint32_t space, const char *text, uint32_t length);

static inline uint64_t *arena_word(const struct arena *arena, size_t offset) {
    return (uint64_t *)(void *)(arena->base + offset);
}

static inline uint8_t *arena_descriptor(const struct arena *arena, uint32_t index) {
    return arena->base + arena->fixed.descriptors_offset + (uint64_t)index * ARENA_DESCRIPTOR_BYTES;
}

static inline uint32_t *arena_state(const struct arena *arena, uint32_t index) {
    return (uint32_t *)(void *)(arena_descriptor(arena, index) + ARENA_STATE);
}

static inline uint64_t *arena_buffer_word(const struct arena *arena, uint32_t index, size_t offset) {
    return (uint64_t *)(void *)(arena_descriptor(arena, index) + offset);
}

static inline uint8_t *arena_buffer(const struct arena *arena, uint32_t index) {
    return arena->base + arena->fixed.buffers_offset + index * arena->fixed.buffer_bytes;
}

static inline uint32_t arena_load_state(const struct arena *arena, uint32_t index) {
    return __atomic_load_n(arena_state(arena, index), __ATOMIC_ACQUIRE);
}

static inline void arena_set_state(const struct arena *arena, uint32_t index, uint32_t state) {
    __atomic_store_n(arena_state(arena, index), state, __ATOMIC_RELEASE);
}

static inline uint64_t arena_load(const struct arena *arena, size_t offset) {
    return __atomic_load_n(arena_word(arena, offset), __ATOMIC_ACQUIRE);
}

static inline void arena_store(const struct arena *arena, size_t offset, uint64_t value) {
    __atomic_store_n(arena_word(arena, offset), value, __ATOMIC_RELEASE);
}

/* One writer per word: no read-modify-write needed. */
static inline void arena_add(const struct arena *arena, size_t offset, uint64_t amount) {
    arena_store(arena, offset, arena_load(arena, offset) + amount);
}

#endif
