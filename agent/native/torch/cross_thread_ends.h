/* Ops that ended on another thread than the one they began on: their thread finds the ends here. */
#ifndef KINETO_OPS_ELSEWHERE_H
#define KINETO_OPS_ELSEWHERE_H

#include <stdint.h>

void ops_elsewhere_reset(void);
/* Records that the op of this RecordFunction has ended on the calling thread, where it did not begin. */
void ops_elsewhere_add(const void *function, uint64_t end_ns);
/* Returns how many there have been. */
uint64_t ops_elsewhere_count(void);
/* Takes the end of an op that began at `start_ns`: Unix ns, or 0 if none is known. */
uint64_t ops_elsewhere_take(const void *function, uint64_t start_ns);

#endif
