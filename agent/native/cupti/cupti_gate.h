/* Noticing whoever else in the process takes CUPTI into use. */
#ifndef KINETO_CUPTI_GATE_H
#define KINETO_CUPTI_GATE_H

#include <stdbool.h>
#include <stdint.h>

#include "cupti/cupti_api.h"

struct gate_visit {
    int64_t time_ns; /* Unix; 0: nobody has come */
    uint64_t caller; /* where the call returns to */
    const char *function;
};

/* Places the gates of this library, unless that is done. `give_way` is called on the thread of somebody else who
 * enters one while they are armed: CUPTI must be his when it returns. "" or why somebody may not be noticed.
 * Replaces api->finalize, which is ours on any thread. */
const char *gate_place(struct cupti_api *api, void (*give_way)(void));
/* Until gate_disarm the first who comes is given way to, and all who come meanwhile wait for that. */
void gate_arm(void);
void gate_disarm(void);
/* Who has come since gate_arm. */
struct gate_visit gate_visit(void);
/* Somebody may have come through a gate just before gate_arm and be inside CUPTI: waits until he should have ended. */
void gate_settle(void);
/* How many activities others have enabled and not disabled again since the gates were placed, as far as they tell. */
uint32_t gate_in_use(void);
/* Whether the last that others did was to disable the last of these. */
bool gate_ended(void);
/* Between these two this thread's calls are ours. One thread at a time. */
void gate_ours_begin(void);
void gate_ours_end(void);
/* In a forked child: everybody passes. */
void gate_kill(void);

#endif
