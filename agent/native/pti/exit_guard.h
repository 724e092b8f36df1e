/* Keeps PTI's exit destructors from running in forked children. */
#ifndef KINETO_PTI_EXIT_GUARD_H
#define KINETO_PTI_EXIT_GUARD_H

#include <stdbool.h>

/* Call after PTI's core library has been loaded, before it is called. False: the layout of the library is unknown. A
 * repeated call has no effect. */
bool exit_guard_place(void);

#endif
