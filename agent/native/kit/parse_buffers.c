/* Reading returned buffers just far enough to publish them: record sizes, counts and names.
 *
 * Theory of operation
 *   Records in lent buffers carry a kind and no size. The library's next_record knows the sizes; the distance between
 *   two records that it returns is the size of the first. A buffer with a new kind is walked with it once (`learn`);
 *   all others are walked by the learned sizes: 3 ns a record with names (tests/bench/collector.py) where CUDA 13's
 *   cuptiActivityGetNextRecord alone takes 9. A walk must end exactly at the last valid byte. One that does not is
 *   learned again, and if the records contradict the sizes learned before, the buffer is not published: its records
 *   count as dropped, because the daemon could only misread them.
 *
 *   Pushed records have headers with their sizes, which our own code has written.
 *
 *   The name in a record is a pointer into this process. Its text is put into the string table before the buffer turns
 *   READY, so that the daemon can name every record it sees, even after the process died. Names known by their pointers
 *   cost a look-up in the walk. If pointers do not identify texts (KIT_BY_TEXT), a second pass over the buffer reads
 *   the texts, a page of memory with one system call, and puts their hashes in the place of the pointers. It comes
 *   after the walk has succeeded, since a walk may be repeated and a pointer is replaced once.
 *
 * Threads: the collector's; the agent's prepares the walker.
 * Blocks: inside the library's next_record at most.
 */
#include "kit/parse_buffers.h"

#include <stdlib.h>
#include <string.h>

#include "common/text_hash.h"

#define RECORD_BYTES_MOST 4096u
#define RECORD_ALIGNMENT 8u

struct walker_scratch {
    char text[KIT_TEXT_BYTES_MOST];
    struct names_pages pages;
};

const char *walker_refuses(const struct kit_library *library) {
    if (library->name_count > KIT_NAMES_MOST) {
        return "it has more kinds of names than the kit";
    }
    for (uint32_t i = 0; i < library->name_count; i++) {
        const struct kit_name *name = &library->names[i];
        if (name->kind >= ARENA_RECORD_KINDS || name->offset == 0 ||
            name->offset > RECORD_BYTES_MOST - sizeof(uint64_t) || name->space > UINT8_MAX || name->key > KIT_BY_TEXT) {
            return "it describes a name that cannot be in a record";
        }
    }
    return "";
}

bool walker_init(struct walker *walker, const struct kit_vendor *vendor, const struct kit_library *library,
                 struct arena *arena) {
    memset(walker, 0, sizeof *walker);
    walker->next_record = vendor->next_record;
    walker->arena = arena;
    for (uint32_t i = 0; i < library->name_count; i++) {
        const struct kit_name *name = &library->names[i];
        const uint32_t least = name->offset + (uint32_t)sizeof(uint64_t);
        if (walker->least[name->kind] < least) {
            walker->least[name->kind] = least;
        }
        if (name->key == KIT_BY_TEXT) {
            walker->texts[walker->text_count++] = *name;
        } else {
            walker->pointers[name->kind] = (struct walker_pointer){.offset = name->offset, .space = name->space};
            walker->pointer = *name;
            walker->pointer_count++;
        }
    }
    walker->scratch = malloc(sizeof *walker->scratch);
    return names_init(&walker->names) && walker->scratch != NULL;
}

void walker_free(struct walker *walker) {
    names_free(&walker->names);
    free(walker->scratch);
    walker->scratch = NULL;
}

static uint32_t kind_of(const uint8_t *record) {
    uint32_t kind;
    memcpy(&kind, record, sizeof kind);
    return kind;
}

/* ---- sizes ---- */

static bool learn_one(struct walker *walker, uint32_t kind, uint64_t bytes) {
    if (kind >= ARENA_RECORD_KINDS || bytes == 0 || bytes > RECORD_BYTES_MOST || bytes % RECORD_ALIGNMENT != 0 ||
        bytes < walker->least[kind]) {
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
    if (walker->next_record(buffer, valid, &record) != 0) {
        return false;
    }
    for (;;) {
        uint8_t *previous = record;
        const bool more = walker->next_record(buffer, valid, &record) == 0;
        const uint8_t *next = more ? record : buffer + valid;
        if (next <= previous || !learn_one(walker, kind_of(previous), (uint64_t)(next - previous))) {
            return false;
        }
        if (!more) {
            return true;
        }
    }
}

/* ---- names ---- */

static bool put_text(struct walker *walker, uint32_t space, uint64_t key, const char *text, int64_t length) {
    if (length < 0 || !arena_add_string(walker->arena, key, space, text, (uint32_t)length)) {
        walker->names_lost++;
        return false;
    }
    return true;
}

bool walker_add_text(struct walker *walker, uint32_t space, uint64_t key, const char *text, uint32_t length) {
    const uint32_t most = length < KIT_TEXT_BYTES_MOST ? length : KIT_TEXT_BYTES_MOST;
    return !names_insert(&walker->names, names_key(space, key)) || put_text(walker, space, key, text, most);
}

static void add_name(struct walker *walker, uint32_t space, uint64_t pointer, uint64_t key) {
    char *text = walker->scratch->text;
    if (names_insert(&walker->names, key)) {
        (void)put_text(walker, space, pointer, text, names_read_text(pointer, text, KIT_TEXT_BYTES_MOST));
    }
}

static inline void note_name(struct walker *walker, const uint8_t *record, struct walker_pointer at) {
    uint64_t pointer;
    memcpy(&pointer, record + at.offset, sizeof pointer);
    const uint64_t key = names_key(at.space, pointer);
    if (pointer != 0 && !names_known(&walker->names, key)) {
        add_name(walker, at.space, pointer, key);
    }
}

/* Replaces the address of a text by its hash; by 0 if it cannot be read. */
static void replace_text(struct walker *walker, uint32_t space, uint8_t *place) {
    struct walker_scratch *scratch = walker->scratch;
    const char *text;
    uint64_t address, key = 0;
    memcpy(&address, place, sizeof address);
    if (address == 0) {
        return;
    }
    int64_t length = names_find_text(&scratch->pages, address, &text);
    if (length < 0) {
        text = scratch->text;
        length = names_read_text(address, scratch->text, KIT_TEXT_BYTES_MOST);
    }
    if (length >= 0) {
        key = text_hash(text, (size_t)length, space);
        (void)walker_add_text(walker, space, key, text, (uint32_t)length);
    } else {
        walker->names_lost++;
    }
    memcpy(place, &key, sizeof key);
}

/* Does so in a buffer that has been walked. */
static void replace_texts(struct walker *walker, const struct kit_name *name, uint8_t *buffer, size_t valid) {
    names_pages_reset(&walker->scratch->pages);
    for (uint8_t *record = buffer; record < buffer + valid; record += walker->sizes[kind_of(record)]) {
        if (kind_of(record) == name->kind) {
            replace_text(walker, name->space, record + name->offset);
        }
    }
}

/* ---- walks ---- */

/* See walk. `one`: names occur in one kind of record only, in space 0. */
static inline __attribute__((always_inline)) int64_t walk_names(struct walker *walker, const uint8_t *buffer,
                                                                size_t valid, bool one) {
    const struct walker_pointer only = {.offset = walker->pointer.offset, .space = ARENA_SPACE_KERNEL_NAME};
    const uint32_t only_kind = walker->pointer.kind;
    const uint8_t *record = buffer;
    const uint8_t *end = buffer + valid;
    int64_t records = 0;
    while (record < end) {
        const uint32_t kind = kind_of(record);
        const uint32_t bytes = kind < ARENA_RECORD_KINDS ? walker->sizes[kind] : 0;
        if (bytes == 0 || bytes > (size_t)(end - record)) {
            return -1;
        }
        if (one ? kind == only_kind : walker->pointers[kind].offset != 0) {
            note_name(walker, record, one ? only : walker->pointers[kind]);
        }
        record += bytes;
        records++;
    }
    return records;
}

/* The number of records, or -1 if the learned sizes do not fit. Looking for names of kernels only, as with CUPTI, is
 * 0.25 ns a record faster than for names of any kind and space: a tenth of the total. */
static int64_t walk(struct walker *walker, const uint8_t *buffer, size_t valid) {
    const bool one = walker->pointer_count == 1 && walker->pointer.space == ARENA_SPACE_KERNEL_NAME;
    return one ? walk_names(walker, buffer, valid, true) : walk_names(walker, buffer, valid, false);
}

static int64_t walk_or_learn(struct walker *walker, uint8_t *buffer, size_t valid) {
    int64_t records = walk(walker, buffer, valid);
    if (records < 0) {
        records = learn(walker, buffer, valid) ? walk(walker, buffer, valid) : -1;
    }
    for (uint32_t i = 0; records > 0 && i < walker->text_count; i++) {
        replace_texts(walker, &walker->texts[i], buffer, valid);
    }
    return records;
}

/* Takes what another thread's add_text has pushed: an arena_string, then the text. */
static void take_text(struct walker *walker, const uint8_t *record, uint32_t bytes) {
    struct arena_string head;
    memcpy(&head, record, sizeof head);
    if (head.length <= bytes - sizeof head) {
        (void)walker_add_text(walker, head.space, head.key, (const char *)record + sizeof head, head.length);
    }
}

static int64_t walk_headed(struct walker *walker, const uint8_t *buffer, size_t valid) {
    int64_t records = 0;
    size_t at = 0;
    while (at < valid) {
        struct kit_header header;
        memcpy(&header, buffer + at, sizeof header);
        if (header.kind == KIT_KIND_TEXT) {
            take_text(walker, buffer + at + sizeof header, header.bytes - (uint32_t)sizeof header);
        } else {
            records++;
        }
        at += header.bytes;
    }
    return records;
}

void walker_drop(struct walker *walker, uint8_t *buffer, size_t valid) {
    uint64_t records = 0;
    void *record = NULL;
    while (walker->next_record(buffer, valid, &record) == 0) {
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

static int64_t parse(struct walker *walker, uint8_t *buffer, uint64_t valid) {
    if (valid == 0) {
        return 0;
    }
    /* Texts of other threads always have headers. */
    const bool headed = walker->next_record == NULL || kind_of(buffer) == KIT_KIND_TEXT;
    return headed ? walk_headed(walker, buffer, valid) : walk_or_learn(walker, buffer, valid);
}

void walker_publish(struct walker *walker, uint32_t index) {
    struct arena *arena = walker->arena;
    uint8_t *buffer = arena_buffer(arena, index);
    const uint64_t valid = __atomic_load_n(arena_buffer_word(arena, index, ARENA_BUFFER_VALID_BYTES), __ATOMIC_RELAXED);
    const int64_t records = parse(walker, buffer, valid);
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
