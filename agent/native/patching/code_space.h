/* Finds room for a few instructions of ours in this process. */
#ifndef KINETO_ROOM_H
#define KINETO_ROOM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct room {
    uintptr_t begin, end;
};

/* The free pages between `low` and `high`, ascending, `most` ranges at most. Excludes a page at both ends, and the room
 * for growth of the main stack and the heap. Also 0 if the mappings cannot be read. */
uint32_t room_between(uintptr_t low, uintptr_t high, struct room *rooms, uint32_t most);

/* Unused ranges in the code of the library that contains `code`: first the rest of their last page, which may be empty,
 * then `least` bytes or more between functions that it exports. */
uint32_t room_in_library(const void *code, size_t least, struct room *rooms, uint32_t most);

/* What the dynamic loader keeps between the library's instructions and what follows them, without access: libraries that
 * are linked for pages of 2 MiB have it. False: there is none, or somebody has put it to use. */
bool room_behind_code(const void *code, struct room *room);

#endif
