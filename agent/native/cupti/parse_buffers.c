/* Reading returned buffers just far enough to publish them: record sizes, counts and kernel names.
 *
 * Theory of operation
 *   Records carry a kind and no size. cuptiActivityGetNextRecord knows the sizes; the distance between two
 *   records that it returns is the size of the first. A buffer with a kind not seen before is walked with it
 *   once (`learn`); all others are walked by the learned sizes: 3 ns a record with names (tests/bench/collector.py)
 *   where CUDA 13's cuptiActivityGetNextRecord alone takes 9. A walk must end exactly at the last valid byte. One that
 *   does not is learned anew, and if the records contradict the sizes learned before, the buffer is not published: its
 *   records count as dropped, because the daemon could only misread them.
 *
 *   The name in a kernel record is a pointer into this process. Its text is put into the string table before
 *   the buffer turns READY, so that the daemon can name every kernel it sees, even after the process died.
 *
 * Threads: the collector's; the agent's prepares the walker.
 * Blocks: inside cuptiActivityGetNextRecord at most.
 */
#include "cupti/parse_buffers.h"

#include <string.h>

#define NAME_BYTES_MOST 65536u
#define RECORD_BYTES_MOST 4096u
#define RECORD_ALIGNMENT 8u

bool walker_init(struct walker *walker, const struct cupti_api *api, struct arena *arena, uint32_t kernel_name_offset) {
    memset(walker, 0, sizeof *walker);
    walker->api = api;
    walker->arena = arena;
    walker->kernel_name_offset = kernel_name_offset;
    return names_init(&walker->names);
}

void walker_free(struct walker *walker) { names_free(&walker->names); }

static uint32_t kind_of(const uint8_t *record) {
    uint32_t kind;
    memcpy(&kind, record, sizeof kind);
    return kind;
}

static bool learn_one(struct walker *walker, uint32_t kind, uint64_t bytes) {
    if (kind >= ARENA_RECORD_KINDS || bytes == 0 || bytes > RECORD_BYTES_MOST || bytes % RECORD_ALIGNMENT != 0) {
        return false;
    }
    if (kind == CUPTI_KIND_CONCURRENT_KERNEL && bytes < walker->kernel_name_offset + sizeof(uint64_t)) {
        return false;
    }
    if (walker->sizes[kind] == 0) {
        walker->sizes[kind] = (uint32_t)bytes;
        uint32_t *published = (uint32_t *)(void *)(walker->arena->base + ARENA_RECORD_BYTES) + kind;
        __atomic_store_n(published, (uint32_t)bytes, __ATOMIC_RELEASE);
    }
    return walker->sizes[kind] == bytes;
}

static bool learn(struct walker *walker, uint8_t *buffer, size_t valid) {
    void *record = NULL;
    if (walker->api->get_next_record(buffer, valid, &record) != CUPTI_SUCCESS) {
        return false;
    }
    for (;;) {
        uint8_t *previous = record;
        const bool more = walker->api->get_next_record(buffer, valid, &record) == CUPTI_SUCCESS;
        const uint8_t *next = more ? record : buffer + valid;
        if (next <= previous || !learn_one(walker, kind_of(previous), (uint64_t)(next - previous))) {
            return false;
        }
        if (!more) {
            return true;
        }
    }
}

static void add_name(struct walker *walker, uint64_t pointer) {
    static char text[NAME_BYTES_MOST]; /* one collector thread */
    if (!names_insert(&walker->names, pointer)) {
        return;
    }
    const int64_t length = names_read_text(pointer, text, sizeof text);
    if (length < 0 || !arena_add_string(walker->arena, pointer, ARENA_SPACE_KERNEL_NAME, text, (uint32_t)length)) {
        walker->names_lost++;
    }
}

static void note_name(struct walker *walker, const uint8_t *record) {
    uint64_t pointer;
    memcpy(&pointer, record + walker->kernel_name_offset, sizeof pointer);
    if (pointer != 0 && !names_known(&walker->names, pointer)) {
        add_name(walker, pointer);
    }
}

/* The number of records, or -1 if the learned sizes do not fit. */
static int64_t walk(struct walker *walker, const uint8_t *buffer, size_t valid) {
    const uint8_t *record = buffer;
    const uint8_t *end = buffer + valid;
    int64_t records = 0;
    while (record < end) {
        const uint32_t kind = kind_of(record);
        const uint32_t bytes = kind < ARENA_RECORD_KINDS ? walker->sizes[kind] : 0;
        if (bytes == 0 || bytes > (size_t)(end - record)) {
            return -1;
        }
        if (kind == CUPTI_KIND_CONCURRENT_KERNEL) {
            note_name(walker, record);
        }
        record += bytes;
        records++;
    }
    return records;
}

static int64_t walk_or_learn(struct walker *walker, uint8_t *buffer, size_t valid) {
    const int64_t records = walk(walker, buffer, valid);
    if (records >= 0) {
        return records;
    }
    return learn(walker, buffer, valid) ? walk(walker, buffer, valid) : -1;
}

void walker_drop(struct walker *walker, uint8_t *buffer, size_t valid) {
    uint64_t records = 0;
    void *record = NULL;
    while (walker->api->get_next_record(buffer, valid, &record) == CUPTI_SUCCESS) {
        records++;
    }
    arena_add(walker->arena, ARENA_DROPPED, records);
}

static void set_ready(struct arena *arena, uint32_t index, uint64_t records, uint64_t valid) {
    const uint64_t sequence = arena_load(arena, ARENA_SEQUENCE);
    __atomic_store_n(arena_buffer_word(arena, index, ARENA_BUFFER_SEQUENCE), sequence, __ATOMIC_RELAXED);
    __atomic_store_n(arena_buffer_word(arena, index, ARENA_BUFFER_RECORDS), records, __ATOMIC_RELAXED);
    arena_add(arena, ARENA_RECORDS, records);
    arena_add(arena, ARENA_VALID_BYTES, valid);
    arena_store(arena, ARENA_SEQUENCE, sequence + 1);
    arena_set_state(arena, index, ARENA_READY);
}

void walker_publish(struct walker *walker, uint32_t index) {
    struct arena *arena = walker->arena;
    uint8_t *buffer = arena_buffer(arena, index);
    const uint64_t valid = __atomic_load_n(arena_buffer_word(arena, index, ARENA_BUFFER_VALID_BYTES), __ATOMIC_RELAXED);
    const int64_t records = valid == 0 ? 0 : walk_or_learn(walker, buffer, valid);
    if (records > 0) {
        set_ready(arena, index, (uint64_t)records, valid);
        return;
    }
    if (records < 0) {
        const uint64_t before = arena_load(arena, ARENA_DROPPED);
        walker_drop(walker, buffer, valid);
        walker->irregular_records += arena_load(arena, ARENA_DROPPED) - before;
    }
    arena_set_state(arena, index, ARENA_FREE);
}
