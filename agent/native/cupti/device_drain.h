/* Whether the GPU work of this process ends soon, which CUPTI's first call and cuptiFinalize wait for. */
#ifndef KINETO_DEVICE_DRAIN_H
#define KINETO_DEVICE_DRAIN_H

#include <stdbool.h>
#include <stdint.h>

#include "cupti/collector.h"

struct drain_wish {
    int64_t limit_ns;        /* how much queued work counts as short */
    int64_t patience_ns;     /* how long to wait for an idle moment */
    int64_t settle_ns;       /* once captures are noted: for those that began before */
    const uint64_t *streams; /* never destroyed, may already be captured */
    uint32_t stream_count;
    bool only_gate;     /* note captures, and wait for nothing */
    bool blind;         /* wait for nothing at all */
    bool hold;          /* hold launches back from that moment until `call` has returned */
    void (*call)(void); /* NULL or called in that moment, on a thread that may get stuck in it */
    void (*undo)(void); /* called after it if the caller has stopped waiting */
};

void drain_await(const struct drain_wish *wish, struct kc_drain_result *result);
/* On any thread: makes drain_await return. */
void drain_hurry(void);
/* Stops noting captures, which drain_await has started. */
void drain_end(void);
void drain_forked(void);
/* libcuda as loaded by the process; NULL: not loaded. */
void *drain_driver(void);

#endif
