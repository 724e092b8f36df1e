/* The thread that switches PTI's views on and off.
 *
 * PTI counts the views that are on, to trace Level Zero as long as there is one, and records for each thread which ones
 * that thread has switched on: a view switched off by another thread stays counted, and tracing never ends. The agent's
 * thread begins a recording, but any may end it: one on which the program's profiler starts, or one that exits. So a
 * dedicated thread does both.
 */
#ifndef KINETO_PTI_SWITCH_THREAD_H
#define KINETO_PTI_SWITCH_THREAD_H

typedef void (*switch_function)(void);

/* Starts the thread, which calls `on` at once and `off` at the end; returns when `on` has. 0, or an errno. */
int switch_on(switch_function on, switch_function off);
/* Returns when `off` has returned and the thread has ended. Does nothing if not on. */
void switch_off(void);

#endif
