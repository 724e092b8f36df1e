/* Detecting other tools in the process that begin to use CUPTI. */
#ifndef KINETO_CUPTI_GATE_H
#define KINETO_CUPTI_GATE_H

#include <stdbool.h>
#include <stdint.h>

#include "cupti/cupti_api.h"

struct gate_visit {
    int64_t time_ns; /* Unix; 0: no one has come */
    uint64_t caller; /* the return address of the call */
    const char *function;
};

/* Places the gates of this library, unless they are placed. `give_way` is called on the thread of another tool that
 * enters one while they are armed: that tool must have CUPTI when it returns. Returns "" or why a user may go
 * unnoticed. Replaces api->finalize, which is ours on any thread. */
const char *gate_place(struct cupti_api *api, void (*give_way)(void));
/* Until gate_disarm we yield to the first caller, and callers that come during that wait for it. */
void gate_arm(void);
void gate_disarm(void);
/* Returns who has come since gate_arm. */
struct gate_visit gate_visit(void);
/* Waits for a caller that may have passed a gate just before gate_arm and still be inside CUPTI. */
void gate_settle(void);
/* How many activities others have enabled and not disabled again since the gates were placed, as far as known. */
uint32_t gate_in_use(void);
/* Whether the last call of another tool disabled its last activity. */
bool gate_ended(void);
/* Between these two, this thread's calls are ours. One thread at a time. */
void gate_ours_begin(void);
void gate_ours_end(void);
/* Around our calls of CUDA's driver. If another tool enables or disables its recording of such calls during one, CUPTI
 * 13.0 writes a record without a kind, at which that tool stops reading. So a caller waits at its gate until our call
 * has returned, and none begins while a caller may be inside CUPTI, but for *may_wait_ns at most, which is reduced by
 * what it has waited. `waits`, if any, is called again and again in that time. Not nested. */
void gate_driver_begin(int64_t *may_wait_ns, void (*waits)(void *), void *argument);
void gate_driver_end(void);
/* In a forked child: all calls pass. */
void gate_kill(void);

#endif
