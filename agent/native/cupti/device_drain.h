/* Whether the GPU work of this process ends soon: what CUPTI's first call and cuptiFinalize wait for. */
#ifndef KINETO_DEVICE_DRAIN_H
#define KINETO_DEVICE_DRAIN_H

#include <stdbool.h>
#include <stdint.h>

#include "cupti/collector.h"

/* Waits for a good moment, `patience_ns` at most; `limit_ns` is how much queued work is soon done. torch_pools: torch has
 * made its pools of streams. */
void drain_await(int64_t limit_ns, int64_t patience_ns, bool torch_pools, struct kc_drain_result *result);
/* On any thread: drain_await returns. */
void drain_hurry(void);
/* Stops noting captures, which drain_await has begun. */
void drain_end(void);
void drain_forked(void);

#endif
