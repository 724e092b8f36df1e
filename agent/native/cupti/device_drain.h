/* Whether the GPU work of this process ends soon: what CUPTI's first call and cuptiFinalize wait for. */
#ifndef KINETO_DEVICE_DRAIN_H
#define KINETO_DEVICE_DRAIN_H

#include <stdbool.h>
#include <stdint.h>

#include "cupti/collector.h"

struct drain_wish {
    int64_t limit_ns;        /* how much queued work is soon done */
    int64_t patience_ns;     /* how long to wait for a moment without any */
    int64_t settle_ns;       /* after captures are noted: for those that began before */
    const uint64_t *streams; /* that are never destroyed and may be captured already */
    uint32_t stream_count;
    bool only_gate; /* note captures, and wait for nothing */
    bool hold;      /* in that moment hold launches back (launch_hold.h), which the caller must release */
};

void drain_await(const struct drain_wish *wish, struct kc_drain_result *result);
/* On any thread: drain_await returns. */
void drain_hurry(void);
/* Stops noting captures, which drain_await has begun. */
void drain_end(void);
void drain_forked(void);
/* libcuda as the process has loaded it; NULL: it has not. */
void *drain_driver(void);

#endif
