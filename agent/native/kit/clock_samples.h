/* Samples of the clocks in which a library may give times, for the daemon to translate them. */
#ifndef KINETO_KIT_CLOCK_SAMPLES_H
#define KINETO_KIT_CLOCK_SAMPLES_H

#include "common/arena.h"

/* Sets both samples in the arena's header. */
void clocks_begin(const struct arena *arena);
/* Sets the last one. */
void clocks_sample(const struct arena *arena);
/* Adds a pair to the string table: what `read_clock` shows, under the Unix time at which it does. */
void clocks_add_pair(struct arena *arena, uint64_t (*read_clock)(void));

#endif
