/* Which streams of the program are being captured into CUDA graphs, and a moment in which none is. */
#ifndef KINETO_CAPTURE_GATE_H
#define KINETO_CAPTURE_GATE_H

#include <stdbool.h>
#include <stdint.h>

/* Notes captures from now on, until capture_gate_remove. False: the layout of this driver is unknown. */
bool capture_gate_place(void *cuda);
void capture_gate_remove(void);
/* True: no noted stream is being captured, and no capture begins before capture_gate_leave, for 20 ms at most. */
bool capture_gate_enter(void);
void capture_gate_leave(void);
/* Call in such a moment, right before the call that would end captures. False: a capture has begun since. True:
 * none begins before capture_gate_leave, for 220 ms at most: the call takes microseconds, but our thread may lose its
 * CPU. */
bool capture_gate_recording(void);

#endif
