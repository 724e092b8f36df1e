/* The program's launches and their contexts: CUPTI's first call waits for their work. */
#ifndef KINETO_LAUNCHES_H
#define KINETO_LAUNCHES_H

#include <stdbool.h>
#include <stdint.h>

#define CONTEXTS_NOTED 16u

/* From now on context_note has an effect, until contexts_forget; not if the layout of the driver is unknown. */
void contexts_watch(void *cuda);
/* On any thread of the program, inside a call of CUDA. */
void context_note(void *context);
/* The handle of an entry and its generation; NULL: it is empty. */
void *context_noted(uint32_t entry, uint32_t *generation);
/* Keeps it from being destroyed until context_leave, for 20 ms at most. False: it is gone. One at a time. */
bool context_enter(uint32_t entry, uint32_t generation);
void context_leave(void);
void contexts_forget(void);

/* From now on each context that the program launches into is noted. */
void launches_watch(void *cuda);
/* Makes watched launches wait from now on, for `limit_ns` at most. Returns when that ends (monotonic), which identifies
 * the hold. A later hold replaces it. */
int64_t launches_hold(int64_t limit_ns);
bool launches_are_held(void);
/* The last result of launches_hold, even when that time is over; 0: launches are not held. */
int64_t launches_held_until_ns(void);
/* How many threads are waiting. */
uint32_t launches_waiting(void);
/* Whether so many wait that they may keep another call of the driver waiting: 4 did not block CUPTI's first one, 8 did.
 */
bool launches_crowd(void);

/* Pauses for a call of the driver that does not return. Initialise with zeros. */
struct launch_pauses {
    int64_t length_ns;
    uint32_t in_vain;
};
/* Makes watched launches wait until `is_over(argument)`, for the length of this pause at most: 10 ms. As long as a crowd
 * is found waiting, the next pause is twice as long. After three in a row without a crowd, or one of 320 ms, no more are
 * made until a call has returned: it waits for something else. 0.63 s in all. */
void launches_pause(struct launch_pauses *pauses, bool (*is_over)(void *), void *argument);
/* Lets them go on, unless another hold holds them by now. */
void launches_release(int64_t held);
/* Lets them go on, and stops watching them. */
void launches_leave(void);

#endif
