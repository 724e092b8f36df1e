/* Reading returned buffers just far enough to publish them: record sizes, counts and names. */
#ifndef KINETO_KIT_PARSE_BUFFERS_H
#define KINETO_KIT_PARSE_BUFFERS_H

#include "common/arena.h"
#include "kit/record_names.h"
#include "kit/vendor.h"

/* Where records of one kind have the address of a name, which is its key. */
struct walker_pointer {
    uint32_t offset; /* 0: they have none */
    uint32_t space;
};

struct walker_scratch; /* buffer for texts */

struct walker {
    int32_t (*next_record)(uint8_t *buffer, size_t used, void **record); /* NULL: records have headers */
    struct arena *arena;
    uint32_t sizes[ARENA_RECORD_KINDS]; /* bytes of one record by kind, 0: none seen */
    struct walker_pointer pointers[ARENA_RECORD_KINDS];
    uint32_t pointer_count;
    struct kit_name pointer;               /* the last of them; the only one, if there is one */
    uint32_t least[ARENA_RECORD_KINDS];    /* bytes that a record of the kind must have for its names */
    struct kit_name texts[KIT_NAMES_MOST]; /* names identified by their text */
    uint32_t text_count;
    struct names names;
    struct walker_scratch *scratch;
    uint64_t names_lost;        /* that did not fit the string table or could not be read */
    uint64_t irregular_records; /* in buffers whose records do not have one size per kind: dropped */
};

/* False if there is no memory. `library` holds the names. */
bool walker_init(struct walker *walker, const struct kit_vendor *vendor, const struct kit_library *library,
                 struct arena *arena);
void walker_free(struct walker *walker);
/* Why these names cannot be read; "" if they can. */
const char *walker_refuses(const struct kit_library *library);
/* Publishes one COMPLETED buffer: READY if it has records, else FREE. */
void walker_publish(struct walker *walker, uint32_t index);
/* Counts a spill buffer's records as dropped. */
void walker_drop(struct walker *walker, uint8_t *buffer, size_t valid);
/* Adds a text to the string table, unless its key has one. Returns false if there was no room, counted in
 * names_lost. */
bool walker_add_text(struct walker *walker, uint32_t space, uint64_t key, const char *text, uint32_t length);

#endif
