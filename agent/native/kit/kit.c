/* The kit's exported functions. kit.h describes their use.
 *
 * Threads: the agent's, without the GIL; kc_kit_stop also on any of the program's to which the agent yields.
 * Blocks: each waits for its turn and inside the vendor's library; kc_kit_stop waits up to its limit.
 */
#define _GNU_SOURCE
#include "kit/kit.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/error_text.h"
#include "common/wake.h"
#include "kit/collector.h"
#include "kit/collector_slots.h"
#include "kit/vendors.h"

#define NS_PER_MS 1000000LL

static const char NO_COLLECTOR[] = "no vendor has been opened under this number";

uint32_t kc_kit_abi(void) { return KC_KIT_ABI; }

/* The number of a vendor's collector, or -1; *taken: one of the same name is recording. */
static int find(const struct kit_vendor *vendor, bool *taken) {
    int found = -1;
    for (int i = 0; collectors_get(i) != NULL; i++) {
        const struct kit_collector *collector = collectors_get(i);
        if (collector->vendor == vendor) {
            found = i;
        } else if (strcmp(collector->vendor->name, vendor->name) == 0 &&
                   collector_phase(collector) != COLLECTOR_CLOSED) {
            *taken = true;
        }
    }
    return found;
}

static int make(const struct kit_vendor *vendor, char *error, size_t error_bytes) {
    struct kit_collector *collector = calloc(1, sizeof *collector);
    if (collector == NULL) {
        return refuse(KC_SYSTEM, error, error_bytes, "out of memory");
    }
    collector->vendor = vendor;
    collector->turn = (struct turn)TURN_INITIAL;
    const int number = collectors_add(collector);
    if (number < 0) {
        free(collector);
        return refuse(KC_ORDER, error, error_bytes,
                      "this process has had as many vendors and versions of them as the kit has places for");
    }
    return number;
}

int kc_kit_open(const char *vendor_name, const char *path, uint64_t *version, char *error, size_t error_bytes) {
    bool taken = false;
    const struct kit_vendor *vendor = vendors_find(vendor_name, error, error_bytes);
    if (vendor == NULL) {
        return KC_LIBRARY;
    }
    int number = find(vendor, &taken);
    if (taken) {
        snprintf(error, error_bytes, "another plug-in called %s is recording", vendor->name);
        return KC_ORDER;
    }
    number = number < 0 ? make(vendor, error, error_bytes) : number;
    if (number < 0) {
        return number;
    }
    struct kit_collector *collector = collectors_get(number);
    TURN(&collector->turn);
    const int code = collector_open(collector, path, error, error_bytes);
    *version = collector->library.version;
    return code < 0 ? code : number;
}

int kc_kit_describe(int number, char *text, size_t text_bytes) {
    struct kit_collector *collector = collectors_get(number);
    if (collector == NULL || collector_refuses(collector) != 0 || !collector->opened) {
        return KC_ORDER;
    }
    TURN(&collector->turn);
    *text = 0;
    if (collector->vendor->describe != NULL && collector->vendor->describe(text, text_bytes) < 0) {
        *text = 0;
    }
    return 0;
}

int kc_kit_prepare(int number, const struct kit_config *config, char *error, size_t error_bytes) {
    struct kit_collector *collector = collectors_get(number);
    if (collector == NULL) {
        return refuse(KC_ORDER, error, error_bytes, NO_COLLECTOR);
    }
    TURN(&collector->turn);
    return collector_prepare(collector, config, error, error_bytes);
}

int kc_kit_start(int number, const uint32_t *kinds, uint32_t count, int32_t *results, char *error, size_t error_bytes) {
    struct kit_collector *collector = collectors_get(number);
    if (collector == NULL) {
        return refuse(KC_ORDER, error, error_bytes, NO_COLLECTOR);
    }
    TURN(&collector->turn);
    return collector_start(collector, kinds, count, results, error, error_bytes);
}

int kc_kit_counts(int number, struct kc_counts *counts) {
    struct kit_collector *collector = collectors_get(number);
    if (collector == NULL) {
        return KC_ORDER;
    }
    TURN(&collector->turn);
    return collector_counts(collector, counts);
}

int kc_kit_stop(int number, uint32_t limit_ms, struct kit_stop_result *result) {
    struct kit_collector *collector = collectors_get(number);
    memset(result, 0, sizeof *result);
    if (collector == NULL) {
        return KC_ORDER;
    }
    const int64_t deadline = clock_ns(CLOCK_MONOTONIC) + limit_ms * NS_PER_MS;
    const bool turn = turn_begin_within(&collector->turn, limit_ms * NS_PER_MS, NULL);
    const int refused = collector_refuses(collector);
    const enum collector_phase phase = collector_phase(collector);
    const bool begun = phase == COLLECTOR_RECORDING || phase == COLLECTOR_STOPPED;
    const int code = refused != 0 ? refused : turn && begun ? 0 : KC_ORDER;
    if (code == 0 && phase == COLLECTOR_RECORDING) {
        collector_stop(collector, deadline - clock_ns(CLOCK_MONOTONIC));
    }
    if (code == 0) {
        *result = collector->stopped;
    }
    if (turn) {
        turn_end(&collector->turn);
    }
    return code;
}

int kc_kit_problem(int number, char *text, size_t text_bytes) {
    struct kit_collector *collector = collectors_get(number);
    if (collector == NULL || collector_refuses(collector) != 0) {
        return KC_ORDER;
    }
    TURN(&collector->turn);
    *text = 0;
    if (collector_phase(collector) != COLLECTOR_STOPPED || collector->abandoned) {
        return KC_ORDER;
    }
    if (collector->vendor->problem != NULL && collector->vendor->problem(text, text_bytes) <= 0) {
        *text = 0;
    }
    return 0;
}

int kc_kit_close(int number) {
    struct kit_collector *collector = collectors_get(number);
    if (collector == NULL) {
        return KC_ORDER;
    }
    TURN(&collector->turn);
    return collector_close(collector);
}

void kc_kit_result_text(int number, int32_t result, char *text, size_t text_bytes) {
    const struct kit_collector *collector = collectors_get(number);
    const bool asks = collector != NULL && collector->opened && collector_refuses(collector) == 0 &&
                      collector->vendor->result_text != NULL;
    const char *known = asks ? collector->vendor->result_text(result) : NULL;
    snprintf(text, text_bytes, "%s (%d)", known == NULL ? "unknown result" : known, result);
}
