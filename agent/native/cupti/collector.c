/* The collector's exported functions. collector.h says how they are used.
 *
 * Theory of operation
 *   The recording itself is the kit's (kit/collector.c, cupti_vendor.c). This file adds what only CUPTI has: its
 *   subscriber, the calls recorded through it, the detach, and yielding to another tool that begins to use CUPTI.
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
#include "cupti/launches.h"
#include "cupti/other_users.h"
#include "cupti/subscription.h"
#include "kit/collector_slots.h"

#define NS_PER_MS 1000000LL
#define CLOSE_LIMIT_NS 1000000000LL
#define DRAIN_PATIENCE_NS 1500000000LL
#define DEEP_NS 20000000ull           /* of queued work, with idle moments in between */
#define GIVE_WAY_LIMIT_NS 200000000LL /* for our turn and the last flush together: the program waits */
#define CUPTI_TURN TURN(&cupti_collector.turn)

static struct {
    bool added;         /* to the collectors of this process */
    bool gave_way;      /* to another user of CUPTI, which has it now */
    bool initialised;   /* a call of CUPTI has succeeded, and CUPTI is still attached: its calls wait for nothing */
    uint32_t calling;   /* the first call is in progress, without our turn */
    int64_t calling_ns; /* Unix: since when */
    struct wake called;
    cupti_result first_result;
    int64_t drain_limit_ns;
    struct kc_drain_result drained; /* before the first call */
} self;

static bool dead(void) { return collector_refuses(&cupti_collector) == KC_FORKED; }

static enum collector_phase phase(void) { return collector_phase(&cupti_collector); }

/* KC_FORKED or KC_ORDER: the result of a function called at the wrong time. */
static int out_of_order(void) { return dead() ? KC_FORKED : KC_ORDER; }

static bool gave_way_to_another(void) { return __atomic_load_n(&self.gave_way, __ATOMIC_SEQ_CST); }

/* On the thread of another tool that is about to use CUPTI. */
static void give_way(void) {
    const int64_t deadline = clock_ns(CLOCK_MONOTONIC) + GIVE_WAY_LIMIT_NS;
    if (!turn_begin_within(&cupti_collector.turn, GIVE_WAY_LIMIT_NS, detach_expire)) {
        return;
    }
    if (phase() == COLLECTOR_RECORDING) {
        collector_stop(&cupti_collector, deadline - clock_ns(CLOCK_MONOTONIC));
    }
    __atomic_store_n(&self.gave_way, phase() != COLLECTOR_CLOSED, __ATOMIC_SEQ_CST);
    (void)wake_await(&self.called, &self.calling, 0, deadline - clock_ns(CLOCK_MONOTONIC));
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

/* Children forked from now on are handled, too. */
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

/* What is unknown does not count against the program: drivers before CUDA 12.5 cannot be asked. */
static bool waits_for_gpu(int32_t outcome) {
    return outcome == KC_DRAIN_NOT || outcome == KC_DRAIN_CAPTURING || outcome == KC_DRAIN_CALLED ||
           outcome == KC_DRAIN_UNANSWERED;
}

static bool stays_initialised(void) {
    return __atomic_load_n(&self.initialised, __ATOMIC_SEQ_CST) || attachment_must_stay() != 0;
}

int kc_drain(const struct kc_drain_wish *wanted, const uint64_t *streams, struct kc_drain_result *result) {
    memset(result, 0, sizeof *result);
    if (!added() || dead() || phase() != COLLECTOR_CLOSED) {
        return out_of_order();
    }
    self.drain_limit_ns = wanted->limit_ms * NS_PER_MS;
    if (cupti_collector.opened) {
        (void)gate_place(&cupti.api, give_way); /* who comes waits for our calls of the driver */
    }
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
    __atomic_store_n(&self.gave_way, false, __ATOMIC_SEQ_CST);
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

/* On a thread that may get stuck in it: the program's launches then wait no longer than that. */
static void call_first(void) {
    __atomic_store_n(&self.calling_ns, clock_ns(CLOCK_REALTIME), __ATOMIC_SEQ_CST);
    __atomic_store_n(&self.calling, 1, __ATOMIC_SEQ_CST); /* before: a thread that makes us yield waits for it */
    if (!gave_way_to_another()) {
        gate_ours_begin();
        self.first_result = subscription_open(&cupti.api);
        gate_ours_end();
        const bool is_up = self.first_result == CUPTI_SUCCESS || self.first_result == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS;
        __atomic_store_n(&self.initialised, is_up, __ATOMIC_SEQ_CST);
    }
    __atomic_store_n(&self.calling, 0, __ATOMIC_SEQ_CST);
    wake_post(&self.called);
}

static void undo_first(void) {
    gate_ours_begin();
    subscription_close(&cupti.api);
    gate_ours_end();
}

/* The moment of kc_drain is over: a program that queues a second of work at a time has had time to do so. */
static int32_t subscribe_in_a_moment(void) {
    struct kc_drain_result drained;
    const struct drain_wish wish = {.limit_ns = self.drain_limit_ns,
                                    .patience_ns = DRAIN_PATIENCE_NS,
                                    .blind = self.drained.outcome != KC_DRAIN_SHORT,
                                    .hold = self.drained.queued_ns > DEEP_NS,
                                    .call = call_first,
                                    .undo = undo_first};
    drain_await(&wish, &drained);
    return drained.outcome;
}

int kc_subscribe(int32_t *result) {
    const bool first = !dead() && phase() == COLLECTOR_PREPARED && !stays_initialised();
    const int32_t outcome = first ? subscribe_in_a_moment() : KC_DRAIN_SHORT; /* without the turn: it takes long */
    if (waits_for_gpu(outcome)) {
        *result = outcome;
        return KC_BUSY;
    }
    CUPTI_TURN;
    if (dead() || phase() != COLLECTOR_PREPARED || gave_way_to_another()) {
        if (first && !dead()) {
            subscription_close(&cupti.api);
        }
        return out_of_order();
    }
    *result = first ? self.first_result : subscription_open(&cupti.api);
    others_count(&cupti.api);
    return *result == CUPTI_SUCCESS ? 0 : KC_CUPTI;
}

int kc_others(struct kc_others *others) {
    memset(others, 0, sizeof *others);
    if (dead()) {
        return out_of_order();
    }
    if (phase() != COLLECTOR_CLOSED) {
        others_tell(others);
    }
    const bool calling = __atomic_load_n(&self.calling, __ATOMIC_SEQ_CST) != 0;
    others->standing_ns = calling ? __atomic_load_n(&self.calling_ns, __ATOMIC_SEQ_CST) : detach_since_ns();
    return 0;
}

int kc_start(const uint32_t *kinds, uint32_t count, int32_t *results, char *error, size_t error_bytes) {
    CUPTI_TURN;
    if (gave_way_to_another()) {
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
    const bool ended = phase() == COLLECTOR_STOPPED && gave_way_to_another();
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

static void detach_in_turn(int64_t limit_ns, struct kc_detach_result *result) {
    CUPTI_TURN;
    launches_watch(drain_driver()); /* detach_at_exit holds them */
    detach_run(&cupti.api, limit_ns, result);
    launches_leave();
    if (result->outcome == KC_DETACHED) {
        __atomic_store_n(&self.initialised, false, __ATOMIC_SEQ_CST);
        collector_library_left(&cupti_collector);
    }
}

int kc_detach(uint32_t limit_ms, struct kc_detach_result *result) {
    struct kc_drain_result drained;
    memset(result, 0, sizeof *result);
    if (dead() || phase() != COLLECTOR_STOPPED || cupti_collector.abandoned) {
        return out_of_order();
    }
    /* Without the turn: it takes long. */
    if (subscription_held() && attachment_must_stay() == 0 && waits_for_gpu(drain(false, &drained))) {
        kc_yield();
        *result = (struct kc_detach_result){KC_DETACH_BUSY, drained.outcome, drained.queued_ns};
        return 0;
    }
    detach_in_turn(limit_ms * NS_PER_MS, result);
    return 0;
}

static void release_cupti(void) {
    CUPTI_TURN;
    if (!dead() && phase() == COLLECTOR_RECORDING) {
        collector_stop(&cupti_collector, CLOSE_LIMIT_NS);
    }
    if (!dead() && phase() != COLLECTOR_CLOSED) {
        subscription_close(&cupti.api);
    }
}

static int close_collector(void) {
    CUPTI_TURN;
    return collector_close(&cupti_collector);
}

int kc_close(void) {
    release_cupti();
    if (dead()) {
        return KC_FORKED;
    }
    gate_disarm(); /* without the turn: another thread may be waiting for it. Before the memory is freed, which takes
                    * long */
    const int code = close_collector();
    drain_end();
    return code;
}

void kc_device(uint32_t index, const int32_t *attributes, uint32_t count, struct device_facts *facts) {
    device_describe(index, attributes, count, facts);
}

void kc_result_text(int32_t result, char *text, size_t text_bytes) {
    const char *known = cupti_collector.opened ? cupti_collector.vendor->result_text(result) : NULL;
    snprintf(text, text_bytes, "%s (%d)", known == NULL ? "unknown CUPTI result" : known, result);
}
