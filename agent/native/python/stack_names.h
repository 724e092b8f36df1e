/* Numbers for code objects and stacks, and the entries of the string table that define them. */
#ifndef KINETO_STACKS_NAMES_H
#define KINETO_STACKS_NAMES_H

#include "common/arena.h"
#include "python/frame_walk.h"

struct stack_names;

/* Allocates the state of one recording, in separate memory that no forked child has; NULL with errno set on failure. */
struct stack_names *stack_names_create(void);
void stack_names_destroy(struct stack_names *names);

enum named { NAMED, NAMED_TORN, NAMED_FULL };

/* The node of the walker's stack. */
enum named stack_names_node(struct stack_names *names, struct walker_of_stacks *walker, struct arena *arena,
                            uint32_t *node);

#endif
