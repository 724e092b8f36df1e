/* See cupti_vendor.h.
 *
 * Theory of operation
 *   The kit does what all vendors need (kit/collector.c). This file opens CUPTI and calls its functions that switch
 *   activities on and off, and flush; CUPTI's further needs are behind the hooks: the calls that the subscriber records
 *   (call_records.c), and the gates at which other users of CUPTI are noticed (cupti_gate.c).
 *
 * Threads: the two buffer callbacks on threads of the program and of CUPTI; flush, next_record and take_dropped on the
 *   collector's thread; the rest on the one that has the turn.
 * Blocks: inside CUPTI. The buffer callbacks never do.
 */
#define _GNU_SOURCE
#include "cupti/cupti_vendor.h"

#include "common/error_text.h"
#include "cupti/buffer_callbacks.h"
#include "cupti/call_records.h"
#include "cupti/collector.h"
#include "cupti/cupti_gate.h"
#include "cupti/detach.h"
#include "cupti/detach_safety.h"
#include "cupti/device_drain.h"
#include "cupti/subscription.h"

struct cupti_recording cupti;

void cupti_buffer_requested(uint8_t **buffer, size_t *size, size_t *max_records) {
    *max_records = 0; /* as many as fit */
    pool_request(&cupti_collector.pool, buffer, size);
}

void cupti_buffer_completed(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
    (void)context;
    (void)stream;
    (void)size;
    pool_return(&cupti_collector.pool, buffer, valid);
}

static int open_cupti(const struct kit_host *host, const char *path, struct kit_library *library, char *error,
                      size_t error_bytes) {
    uint32_t version = 0;
    (void)host;
    if (cupti_api_open(&cupti.api, path, error, error_bytes) != 0) {
        return KC_LIBRARY;
    }
    const cupti_result result = cupti.api.get_version(&version);
    if (result != CUPTI_SUCCESS) {
        snprintf(error, error_bytes, "cuptiGetVersion of %s failed with %d", path, result);
        return KC_CUPTI;
    }
    library->version = version;
    return 0;
}

static int begin(struct arena *arena, char *error, size_t error_bytes) {
    attachment_begins(&cupti.api);
    const cupti_result result = cupti.api.register_callbacks(cupti_buffer_requested, cupti_buffer_completed);
    if (result != CUPTI_SUCCESS) {
        kc_result_text(result, error, error_bytes);
        return KC_CUPTI;
    }
    (void)cupti.api.set_thread_id_type(CUPTI_THREAD_ID_SYSTEM);
    calls_select(&cupti.calls, &cupti.api, arena);
    return 0;
}

static void stop(void) {
    records_close();
    kinds_disable(&cupti.kinds, &cupti.api);
    if (cupti.kinds.count > 0) {
        attachment_recording_ends(cupti.graphs_watched && subscription_held());
    }
    (void)subscription_follow_all(&cupti.api, false);
}

static int start(const uint32_t *kinds, uint32_t count, int32_t *results, char *error, size_t error_bytes) {
    attachment_recording_begins();
    /* Before any kind is enabled: no launch may be missed. */
    cupti.graphs_watched = count == 0 || subscription_watch_graphs(&cupti.api, &cupti.calls) == CUPTI_SUCCESS;
    kinds_enable(&cupti.kinds, &cupti.api, kinds, count, results);
    if (cupti.kinds.count == 0 && count > 0) {
        stop();
        return refuse(KC_CUPTI, error, error_bytes, "CUPTI enabled none of the wanted activities");
    }
    return 0;
}

static int32_t flush(bool forced) { return cupti.api.flush_all(forced ? CUPTI_FLUSH_FORCED : CUPTI_FLUSH_DEFAULT); }

static int32_t next_record(uint8_t *buffer, size_t used, void **record) {
    return cupti.api.get_next_record(buffer, used, record);
}

static uint64_t take_dropped(void) {
    size_t dropped = 0;
    return cupti.api.get_num_dropped(NULL, 0, &dropped) == CUPTI_SUCCESS ? dropped : 0;
}

static void release(void) { listener_restore(&cupti.api); }

static const char *result_text(int32_t result) {
    const char *known = NULL;
    return cupti.api.get_result_string(result, &known) == CUPTI_SUCCESS ? known : NULL;
}

static void forked(void) {
    gate_kill();
    drain_forked();
}

static const struct kit_vendor VENDOR = {
    .abi = KIT_ABI,
    .size = sizeof(struct kit_vendor),
    .name = "CUPTI",
    .open = open_cupti,
    .start = start,
    .stop = stop,
    .flush = flush,
    .next_record = next_record,
    .take_dropped = take_dropped,
    .release = release,
    .forked = forked,
    .result_text = result_text,
};

static const struct collector_hooks HOOKS = {
    .begin = begin,
    .close_writers = records_close,
    .hurry = detach_expire,
};

struct kit_collector cupti_collector = {
    .vendor = &VENDOR,
    .hooks = &HOOKS,
    .turn = {.mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP, .begins = gate_ours_begin, .ends = gate_ours_end},
};
