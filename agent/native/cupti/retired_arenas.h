/* Arenas of recordings that are over, of which CUPTI still holds a buffer. */
#ifndef KINETO_RETIRED_H
#define KINETO_RETIRED_H

#include "common/arena.h"

/* Keeps the mapping, gives back the descriptor and all memory but that of LOANED buffers. Takes ownership. */
void retired_add(struct arena *arena);
/* CUPTI has returned a buffer: gives its memory back; frees nothing, CUPTI may hold others of the same arena. */
void retired_release(const uint8_t *buffer);
/* CUPTI has been detached: nobody writes to them any more. */
void retired_free(void);

#endif
