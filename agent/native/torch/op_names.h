/* Texts of op names and descriptions of inputs: hashed, and added to the arena's string table once. */
#ifndef KINETO_OPS_NAMES_H
#define KINETO_OPS_NAMES_H

#include "common/arena.h"

#define OPS_LATE_BYTES 6144u

/* Keys are hashes of the texts (text_hash.h). */

/* Forgets everything, for a new arena. No thread may be inside. */
void ops_names_reset(void);
enum ops_interned {
    OPS_REFUSED, /* no room */
    OPS_LATER,   /* another thread was writing: try again */
    OPS_KNOWN,
};

/* Adds the text to the string table unless it is there. */
enum ops_interned ops_intern(struct arena *arena, uint64_t key, uint32_t space, const void *data, uint32_t bytes);
/* Adds it without checking. */
enum ops_interned ops_add_text(struct arena *arena, uint64_t key, uint32_t space, const void *data, uint32_t bytes);

/* Texts of one thread that have to be tried again. */
struct ops_late {
    uint32_t used;                   /* bytes */
    uint8_t entries[OPS_LATE_BYTES]; /* struct arena_string and text, unaligned */
};
/* Keeps a copy, if there is room and it is not kept already. */
void ops_late_keep(struct ops_late *late, uint64_t key, uint32_t space, const void *data, uint32_t bytes);
/* Tries them again. */
void ops_late_write(struct ops_late *late, struct arena *arena);

/* How many different texts of a space were never added. */
uint64_t ops_names_lost(uint32_t space);

#endif
