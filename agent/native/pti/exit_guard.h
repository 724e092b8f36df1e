/* Keeps what PTI does when a process exits out of forked children. */
#ifndef KINETO_PTI_EXIT_GUARD_H
#define KINETO_PTI_EXIT_GUARD_H

#include <stdbool.h>

/* After PTI's core library has been loaded, before it is called. False: it has been built in a way that we do not know.
 * Again: nothing more to do. */
bool exit_guard_place(void);

#endif
