/* The collector's exported functions. collector.h says how they are used.
 *
 * Theory of operation
 *   The recording itself is the kit's (kit/collector.c, cupti_vendor.c). Here is what CUPTI alone has: its subscriber,
 *   the calls that are recorded through it, the detach, and giving way to somebody else who takes CUPTI into use.
 *
 * Threads: the exported functions run on the agent's thread, without the GIL; give_way on a thread of the program
 *   that is about to use CUPTI.
 * Blocks: each waits for its turn and inside CUPTI; kc_stop, kc_detach and give_way wait for their limits at most. No
 *   vendor callback is in this file.
 */
#define _GNU_SOURCE
#include "cupti/collector.h"

#include <string.h>
#include <time.h>

#include "common/error_text.h"
#include "common/wake.h"
#include "cupti/call_records.h"
#include "cupti/cupti_gate.h"
#include "cupti/cupti_vendor.h"
#include "cupti/detach.h"
#include "cupti/detach_safety.h"
#include "cupti/device_drain.h"
#include "cupti/launch_hold.h"
#include "cupti/other_users.h"
#include "cupti/subscription.h"
#include "kit/collector_slots.h"

#define NS_PER_MS 1000000LL
#define CLOSE_LIMIT_NS 1000000000LL
#define DRAIN_PATIENCE_NS 1500000000LL
#define DEEP_NS 20000000ull           /* of queued work, with moments without any */
#define GIVE_WAY_LIMIT_NS 200000000LL /* for our turn and the last flush together: the program waits */
#define CUPTI_TURN TURN(&cupti_collector.turn)

static struct {
    bool added;       /* to the collectors of this process */
    bool gave_way;    /* to somebody else who uses CUPTI, and has it now */
    bool initialised; /* CUPTI has been called, and stayed */
    int64_t drain_limit_ns;
    struct kc_drain_result drained; /* before the first call */
} self;

static bool dead(void) { return collector_refuses(&cupti_collector) == KC_FORKED; }

static enum collector_phase phase(void) { return collector_phase(&cupti_collector); }

/* KC_FORKED or KC_ORDER: what a function that comes at the wrong time returns. */
static int out_of_order(void) { return dead() ? KC_FORKED : KC_ORDER; }

/* On the thread of somebody who is about to use CUPTI. */
static void give_way(void) {
    const int64_t deadline = clock_ns(CLOCK_MONOTONIC) + GIVE_WAY_LIMIT_NS;
    if (!turn_begin_within(&cupti_collector.turn, GIVE_WAY_LIMIT_NS, detach_expire)) {
        return;
    }
    if (phase() == COLLECTOR_RECORDING) {
        collector_stop(&cupti_collector, deadline - clock_ns(CLOCK_MONOTONIC));
    }
    self.gave_way = phase() != COLLECTOR_CLOSED;
    records_close();
    subscription_close(&cupti.api);
    turn_end(&cupti_collector.turn);
}

/* ---- exported ---- */

static int refuse_cupti(cupti_result result, char *error, size_t error_bytes) {
    kc_result_text(result, error, error_bytes);
    return KC_CUPTI;
}

uint32_t kc_abi(void) { return KC_ABI; }

int kc_open(const char *path, uint32_t *version, char *error, size_t error_bytes) {
    const int code = collector_open(&cupti_collector, path, error, error_bytes);
    *version = (uint32_t)cupti_collector.library.version;
    return code;
}

/* A child that is forked from now on is told of it. */
static bool added(void) {
    if (!self.added && !dead()) {
        self.added = collectors_add(&cupti_collector) >= 0;
    }
    return self.added;
}

static int32_t drain(bool hold, struct kc_drain_result *result) {
    const struct drain_wish wish = {.limit_ns = self.drain_limit_ns, .patience_ns = DRAIN_PATIENCE_NS, .hold = hold};
    drain_await(&wish, result);
    return result->outcome;
}

/* What cannot be known is not held against the program: drivers before CUDA 12.5 cannot be asked. */
static bool waits_for_gpu(int32_t outcome) { return outcome == KC_DRAIN_NOT || outcome == KC_DRAIN_CAPTURING; }

/* CUPTI's calls do not wait any more. */
static bool stays_initialised(void) { return self.initialised || attachment_must_stay() != 0; }

int kc_drain(const struct kc_drain_wish *wanted, const uint64_t *streams, struct kc_drain_result *result) {
    memset(result, 0, sizeof *result);
    if (!added() || dead() || phase() != COLLECTOR_CLOSED) {
        return out_of_order();
    }
    self.drain_limit_ns = wanted->limit_ms * NS_PER_MS;
    const struct drain_wish wish = {.limit_ns = self.drain_limit_ns,
                                    .patience_ns = DRAIN_PATIENCE_NS,
                                    .settle_ns = wanted->settle_ms * NS_PER_MS,
                                    .streams = streams,
                                    .stream_count = wanted->stream_count,
                                    .only_gate = stays_initialised()};
    drain_await(&wish, result);
    if (waits_for_gpu(result->outcome)) {
        drain_end();
    }
    self.drained = *result;
    return 0;
}

static void describe(struct kit_library *library, const struct kc_config *config) {
    library->when_full = config->may_decline ? KIT_FULL_DECLINES : KIT_FULL_SPILLS;
    library->names[0] = (struct kit_name){.kind = CUPTI_KIND_CONCURRENT_KERNEL,
                                          .offset = config->kernel_name_offset,
                                          .space = ARENA_SPACE_KERNEL_NAME,
                                          .key = KIT_BY_POINTER};
    library->name_count = 1;
}

int kc_prepare(const struct kc_config *config, char *error, size_t error_bytes) {
    if (!added()) {
        return refuse(out_of_order(), error, error_bytes, "this process has too many collectors");
    }
    const struct kit_config common = {.buffer_limit_bytes = config->buffer_limit_bytes,
                                      .buffer_bytes = config->buffer_bytes,
                                      .strings_bytes = config->strings_bytes,
                                      .prefault_bytes = config->prefault_bytes,
                                      .flush_period_ms = config->flush_period_ms};
    describe(&cupti_collector.library, config);
    const int fd = collector_prepare(&cupti_collector, &common, error, error_bytes);
    if (fd < 0) {
        if (phase() == COLLECTOR_CLOSED) {
            drain_end(); /* no kc_close is due */
        }
        return fd;
    }
    memset(&cupti.calls, 0, sizeof cupti.calls);
    cupti.kinds.count = 0;
    self.gave_way = false;
    others_expect(&cupti.api, give_way);
    return fd;
}

int kc_keep_calls(uint32_t domain, const char *patterns, size_t bytes) {
    if (dead() || phase() != COLLECTOR_PREPARED) {
        return out_of_order();
    }
    const bool known = domain == CUPTI_DOMAIN_DRIVER_API || domain == CUPTI_DOMAIN_RUNTIME_API;
    if (!known || bytes > CALLS_PATTERNS_BYTES) {
        return KC_ORDER;
    }
    memcpy(cupti.calls.patterns[domain], patterns, bytes);
    return 0;
}

/* The moment of kc_drain is over: a program that queues a second of work at once has had time to do so. False: no other
 * one came. */
static bool moment_comes(bool *held) {
    struct kc_drain_result drained;
    if (stays_initialised() || self.drained.outcome != KC_DRAIN_SHORT) {
        return true;
    }
    const bool deep = self.drained.queued_ns > DEEP_NS;
    const int32_t outcome = drain(deep, &drained);
    *held = deep && outcome == KC_DRAIN_SHORT;
    return !waits_for_gpu(outcome);
}

int kc_subscribe(int32_t *result) {
    bool held = false;
    if (!dead() && phase() == COLLECTOR_PREPARED && !moment_comes(&held)) { /* not in our turn: it takes long */
        return KC_BUSY;
    }
    CUPTI_TURN;
    const bool may = !dead() && phase() == COLLECTOR_PREPARED && !self.gave_way;
    if (may) {
        self.initialised = true;
        *result = subscription_open(&cupti.api);
    }
    if (held) {
        launches_release();
    }
    if (!may) {
        return out_of_order();
    }
    others_count(&cupti.api);
    return *result == CUPTI_SUCCESS ? 0 : KC_CUPTI;
}

int kc_others(struct kc_others *others) {
    if (dead() || phase() == COLLECTOR_CLOSED) {
        return out_of_order();
    }
    others_tell(others);
    return 0;
}

int kc_start(const uint32_t *kinds, uint32_t count, int32_t *results, char *error, size_t error_bytes) {
    CUPTI_TURN;
    if (self.gave_way) {
        return refuse(out_of_order(), error, error_bytes, "another tool has taken CUPTI into use");
    }
    return collector_start(&cupti_collector, kinds, count, results, error, error_bytes);
}

int kc_record_calls(char *error, size_t error_bytes) {
    CUPTI_TURN;
    if (dead() || phase() != COLLECTOR_RECORDING) {
        return refuse(out_of_order(), error, error_bytes, "nothing is recorded");
    }
    records_open();
    const cupti_result result = subscription_follow(&cupti.api, &cupti.calls);
    if (result != CUPTI_SUCCESS) {
        records_close();
        return refuse_cupti(result, error, error_bytes);
    }
    return 0;
}

int kc_yield(void) {
    if (dead() || !turn_begin_within(&cupti_collector.turn, GIVE_WAY_LIMIT_NS, detach_expire)) {
        return out_of_order();
    }
    records_close();
    subscription_close(&cupti.api);
    turn_end(&cupti_collector.turn);
    return 0;
}

int kc_hurry(void) {
    if (dead()) {
        return KC_FORKED;
    }
    detach_expire();
    drain_hurry();
    return 0;
}

int kc_counts(struct kc_counts *counts) { return collector_counts(&cupti_collector, counts); }

static int stop_in_turn(int64_t limit_ns, struct kc_stop_result *result) {
    memset(result, 0, sizeof *result);
    const bool ended = phase() == COLLECTOR_STOPPED && self.gave_way;
    if (dead() || (phase() != COLLECTOR_RECORDING && !ended)) {
        return out_of_order();
    }
    if (!ended) {
        collector_stop(&cupti_collector, limit_ns);
    }
    const struct kit_stop_result *stopped = &cupti_collector.stopped;
    *result = (struct kc_stop_result){.counts = stopped->counts,
                                      .cpu_ns = stopped->cpu_ns,
                                      .names_lost = stopped->names_lost,
                                      .calls_unnamed = cupti.calls.unnamed,
                                      .irregular_records = stopped->irregular_records,
                                      .withheld = stopped->withheld,
                                      .timed_out = stopped->timed_out,
                                      .flushes = stopped->flushes,
                                      .flush_result = stopped->flush_result};
    return 0;
}

int kc_stop(uint32_t limit_ms, struct kc_stop_result *result) {
    const int64_t deadline = clock_ns(CLOCK_MONOTONIC) + limit_ms * NS_PER_MS;
    memset(result, 0, sizeof *result);
    if (dead() || !turn_begin_within(&cupti_collector.turn, limit_ms * NS_PER_MS, NULL)) {
        return out_of_order();
    }
    const int code = stop_in_turn(deadline - clock_ns(CLOCK_MONOTONIC), result);
    turn_end(&cupti_collector.turn);
    return code;
}

int kc_detach(uint32_t limit_ms, struct kc_detach_result *result) {
    struct kc_drain_result drained;
    memset(result, 0, sizeof *result);
    if (dead() || phase() != COLLECTOR_STOPPED || cupti_collector.abandoned) {
        return out_of_order();
    }
    /* Not in our turn: it takes long. */
    if (subscription_held() && attachment_must_stay() == 0 && waits_for_gpu(drain(false, &drained))) {
        kc_yield();
        *result = (struct kc_detach_result){KC_DETACH_BUSY, drained.outcome, drained.queued_ns};
        return 0;
    }
    CUPTI_TURN;
    detach_run(&cupti.api, limit_ms * NS_PER_MS, result);
    if (result->outcome == KC_DETACHED) {
        self.initialised = false;
        collector_library_left(&cupti_collector);
    }
    return 0;
}

static int close_recording(void) {
    CUPTI_TURN;
    if (dead() || phase() == COLLECTOR_CLOSED) {
        return dead() ? KC_FORKED : 0;
    }
    if (phase() == COLLECTOR_RECORDING) {
        collector_stop(&cupti_collector, CLOSE_LIMIT_NS);
    }
    subscription_close(&cupti.api);
    return collector_close(&cupti_collector);
}

int kc_close(void) {
    const int code = close_recording();
    if (!dead()) {
        gate_disarm(); /* not in our turn: somebody may be waiting for his */
        drain_end();
    }
    return code;
}

void kc_device(uint32_t index, const int32_t *attributes, uint32_t count, struct device_facts *facts) {
    device_describe(index, attributes, count, facts);
}

void kc_result_text(int32_t result, char *text, size_t text_bytes) {
    const char *known = cupti_collector.opened ? cupti_collector.vendor->result_text(result) : NULL;
    snprintf(text, text_bytes, "%s (%d)", known == NULL ? "unknown CUPTI result" : known, result);
}
