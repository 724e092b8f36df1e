/* Where this process has room for a few instructions of ours. */
#ifndef KINETO_ROOM_H
#define KINETO_ROOM_H

#include <stdint.h>

struct room {
    uintptr_t begin, end;
};

/* The free pages between `low` and `high`, ascending, `most` ranges at most. A page at both ends is left out, and what
 * the main stack and the heap may grow into. 0 as well if the mappings cannot be read. */
uint32_t room_between(uintptr_t low, uintptr_t high, struct room *rooms, uint32_t most);

/* What follows the instructions of the library of `code` in their last page; empty if somebody has used that. */
struct room room_after_code(const void *code);

#endif
