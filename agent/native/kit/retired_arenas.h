/* Arenas of recordings that are over, of which the library still holds a buffer. */
#ifndef KINETO_KIT_RETIRED_ARENAS_H
#define KINETO_KIT_RETIRED_ARENAS_H

#include "common/arena.h"

/* Those of one collector: a list, NULL at first. */
struct retired {
    struct arena *first;
};

/* Keeps the mapping, gives back the descriptor and all memory but that of LOANED buffers. Takes ownership. */
void retired_add(struct retired *retired, struct arena *arena);
/* The library has returned a buffer: gives its memory back; frees nothing, it may hold others of the same arena. */
void retired_release(const struct retired *retired, const uint8_t *buffer);
/* The library is out of the process: nobody writes to them any more. */
void retired_free(struct retired *retired);
/* In a forked child. */
void retired_forked(const struct retired *retired);

#endif
