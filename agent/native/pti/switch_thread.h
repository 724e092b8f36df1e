/* One thread that switches PTI's views on and off again.
 *
 * PTI counts how many views are on, to have Level Zero traced as long as there is one, and it keeps for each thread which
 * ones that thread has switched on: a view that another thread switches off stays counted, and tracing goes on for good.
 * A recording is begun by the agent's thread and may be ended by any: one that the program's profiler starts on, or one
 * that exits. So a thread of ours does both.
 */
#ifndef KINETO_PTI_SWITCH_THREAD_H
#define KINETO_PTI_SWITCH_THREAD_H

typedef void (*switch_function)(void);

/* Starts the thread, which calls `on` at once and `off` at the end; returns when `on` has. 0, or an errno. */
int switch_on(switch_function on, switch_function off);
/* Returns when `off` has, and the thread has ended. Nothing to do: not on. */
void switch_off(void);

#endif
