/* Samples of the clocks that a library's times may use, with which the daemon translates them. */
#ifndef KINETO_KIT_CLOCK_SAMPLES_H
#define KINETO_KIT_CLOCK_SAMPLES_H

#include "common/arena.h"

/* Sets both samples in the arena's header. */
void clocks_begin(const struct arena *arena);
/* Sets the last sample. */
void clocks_sample(const struct arena *arena);
/* Adds a pair to the string table: the value of `read_clock`, under the Unix time at which it was read. */
void clocks_add_pair(struct arena *arena, uint64_t (*read_clock)(void));

#endif
