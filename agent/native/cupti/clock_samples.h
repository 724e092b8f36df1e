/* Samples of the clocks in which CUPTI may give times, for the daemon to translate them. */
#ifndef KINETO_CLOCKS_H
#define KINETO_CLOCKS_H

#include "common/arena.h"

/* Sets both samples in the arena's header. */
void clocks_begin(const struct arena *arena);
/* Sets the last one. */
void clocks_sample(const struct arena *arena);

#endif
