/* Arenas of past recordings of which the library still holds a buffer. */
#ifndef KINETO_KIT_RETIRED_ARENAS_H
#define KINETO_KIT_RETIRED_ARENAS_H

#include "common/arena.h"

/* Those of one collector: a list, initially NULL. */
struct retired {
    struct arena *first;
};

/* Keeps the mapping, closes the descriptor and frees all memory except LOANED buffers. Takes ownership. */
void retired_add(struct retired *retired, struct arena *arena);
/* The library has returned a buffer: frees its memory, but nothing else, since the library may hold others of that
 * arena. */
void retired_release(const struct retired *retired, const uint8_t *buffer);
/* The library has left the process and writes to them no more: frees them. */
void retired_free(struct retired *retired);
/* In a forked child. */
void retired_forked(const struct retired *retired);

#endif
