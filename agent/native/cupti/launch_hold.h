/* Keeps the program from queueing more GPU work while CUPTI is initialised in a moment without any. */
#ifndef KINETO_LAUNCH_HOLD_H
#define KINETO_LAUNCH_HOLD_H

/* From now on, for 100 ms at most, launches wait. Does nothing where the driver is built in a way that we do not know. */
void launches_hold(void *cuda);
/* They go on. */
void launches_release(void);

#endif
