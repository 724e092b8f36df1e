/* The tables that CUPTI's hooks read in order to know whether anybody wants a callback. */
#ifndef KINETO_CALLBACK_TABLES_H
#define KINETO_CALLBACK_TABLES_H

#include <stdbool.h>

/* Gives libcupti empty tables until its first subscriber has some: see callback_tables.c. `functions`: its exported
 * functions that subscribe, NULL if it lacks one. False: its code is none that we know, so nothing was changed. Nothing
 * is changed either if somebody has subscribed before. */
bool callback_tables_fill(const void *const *functions, unsigned count);

#endif
