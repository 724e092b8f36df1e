/* Which streams of the program are being captured into CUDA graphs, and a moment in which none is. */
#ifndef KINETO_CAPTURE_GATE_H
#define KINETO_CAPTURE_GATE_H

#include <stdbool.h>
#include <stdint.h>

/* Notes captures from now on, until capture_gate_remove. False: this driver is built in a way that we do not know. */
bool capture_gate_place(void *cuda);
void capture_gate_remove(void);
/* True: nothing that was noted is captured, and no capture begins before capture_gate_leave, for 20 ms at most. */
bool capture_gate_enter(void);
void capture_gate_leave(void);
/* In such a moment, right before the call that would end captures. False: one did not wait so long. True: none begins
 * before capture_gate_leave, for 220 ms at most: the call takes microseconds, but our thread may lose its CPU. */
bool capture_gate_recording(void);

#endif
