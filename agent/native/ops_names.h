/* Texts of op names and descriptions of inputs: hashed, and put into the arena's string table once. */
#ifndef KINETO_OPS_NAMES_H
#define KINETO_OPS_NAMES_H

#include "arena.h"

/* The hash that stands in records for `bytes` of `data`; never 0. Spaces have hashes of their own. */
uint64_t ops_hash(const void *data, size_t bytes, uint32_t space);

/* Forgets everything: a new arena. Nobody may be inside. */
void ops_names_reset(void);
/* Puts the text into the string table unless it is there. False: it is not in there (yet); a later call tries again. */
bool ops_intern(struct arena *arena, uint64_t key, uint32_t space, const void *data, uint32_t bytes);
/* Puts it there without looking, if the table is not being written by another thread. */
bool ops_try_string(struct arena *arena, uint64_t key, uint32_t space, const void *data, uint32_t bytes);
/* How many different texts of a space never got in. */
uint64_t ops_names_lost(uint32_t space);

#endif
