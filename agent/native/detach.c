/* Taking CUPTI out of the process again.
 *
 * Theory of operation
 *   Disabling activities leaves CUPTI's hooks in every CUDA call (training stays 7-28 % slower); only
 *   cuptiFinalize removes them, and it is safe only inside the end of a CUDA call. So: subscribe, ask for
 *   callbacks of the runtime and driver API, and finalize in the first end of a call that comes, on whatever
 *   thread makes it. Finalizing ends the subscription too.
 *
 *   The requester waits with a limit. One word decides the race between its time-out and a callback:
 *
 *     ARMED -> FINALIZING -> FINALIZED   (a callback won)
 *     ARMED -> EXPIRED                   (the time-out won: no callback will finalize any more)
 *
 *   The process's first subscription must come before CUPTI's hooks are in place, that is before the first
 *   activity is enabled: CUPTI makes the tables that its hooks read while it enables a subscriber's domains,
 *   and a CUDA call of another thread that comes in between reads through a null pointer. On an H200 with
 *   libcupti 13.0, one of three processes that subscribed for the first time after recording crashed so
 *   (162 of 470); none that had subscribed and unsubscribed once before did (0 of 40, and 0 of 2,250 later
 *   detaches). detach_prepare is that first subscription.
 */
#define _GNU_SOURCE
#include "detach.h"

#include <stdbool.h>
#include <string.h>
#include <time.h>

#include "wake.h"

/* cuptiFinalize took 0.01-8 ms; a callback that has begun it gets this long on top of the limit. */
#define FINALIZE_LIMIT_NS 3000000000LL

enum phase { IDLE, ARMED, FINALIZING, FINALIZED, EXPIRED };

static struct {
    uint32_t phase;
    cupti_result result;
    cupti_result (*finalize)(void);
    struct wake done;
} detach;

static bool advance(uint32_t from, uint32_t to) {
    return __atomic_compare_exchange_n(&detach.phase, &from, to, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

/* CUpti_CallbackData begins with the callback site (enter or exit). */
static void on_call(void *user, uint32_t domain, uint32_t cbid, const void *data) {
    (void)user;
    (void)cbid;
    if (domain != CUPTI_DOMAIN_DRIVER_API && domain != CUPTI_DOMAIN_RUNTIME_API) {
        return;
    }
    int site;
    memcpy(&site, data, sizeof site);
    if (site == CUPTI_API_EXIT && advance(ARMED, FINALIZING)) {
        detach.result = detach.finalize();
        __atomic_store_n(&detach.phase, FINALIZED, __ATOMIC_SEQ_CST);
        wake_post(&detach.done);
    }
}

static bool wait_until_finalized(int64_t limit_ns) {
    const int64_t deadline = clock_ns(CLOCK_MONOTONIC) + limit_ns;
    for (;;) {
        const uint32_t seen = wake_seen(&detach.done);
        if (__atomic_load_n(&detach.phase, __ATOMIC_SEQ_CST) == FINALIZED) {
            return true;
        }
        const int64_t left = deadline - clock_ns(CLOCK_MONOTONIC);
        if (left <= 0) {
            return false;
        }
        wake_wait(&detach.done, seen, left);
    }
}

/* Nothing is armed yet: no callback can finalize CUPTI while these calls are inside it. */
static cupti_result subscribe(const struct cupti_api *api, void **subscriber) {
    const cupti_result result = api->subscribe(subscriber, on_call, NULL);
    if (result != CUPTI_SUCCESS) {
        return result;
    }
    const cupti_result runtime = api->enable_domain(1, *subscriber, CUPTI_DOMAIN_RUNTIME_API);
    const cupti_result driver = api->enable_domain(1, *subscriber, CUPTI_DOMAIN_DRIVER_API);
    if (runtime != CUPTI_SUCCESS && driver != CUPTI_SUCCESS) {
        (void)api->unsubscribe(*subscriber);
        return runtime;
    }
    return CUPTI_SUCCESS;
}

static void ignore_call(void *user, uint32_t domain, uint32_t cbid, const void *data) {
    (void)user;
    (void)domain;
    (void)cbid;
    (void)data;
}

void detach_prepare(const struct cupti_api *api) {
    void *subscriber = NULL;
    if (api->subscribe(&subscriber, ignore_call, NULL) == CUPTI_SUCCESS) {
        (void)api->unsubscribe(subscriber);
    }
}

static int32_t await_finalize(const struct cupti_api *api, void *subscriber, int64_t limit_ns) {
    if (!wait_until_finalized(limit_ns)) {
        if (advance(ARMED, EXPIRED)) {
            (void)api->unsubscribe(subscriber);
            return KC_DETACH_NO_CALL;
        }
        if (!wait_until_finalized(FINALIZE_LIMIT_NS)) {
            return KC_DETACH_STUCK;
        }
    }
    if (detach.result != CUPTI_SUCCESS) {
        (void)api->unsubscribe(subscriber); /* else it would be in the way of every later request */
        return KC_DETACH_REFUSED;
    }
    return KC_DETACHED;
}

void detach_run(const struct cupti_api *api, int64_t limit_ns, struct kc_detach_result *result) {
    const int64_t begin = clock_ns(CLOCK_MONOTONIC);
    void *subscriber = NULL;
    memset(result, 0, sizeof *result);
    if (__atomic_load_n(&detach.phase, __ATOMIC_SEQ_CST) == FINALIZING) {
        result->outcome = KC_DETACH_STUCK; /* since an earlier request */
        return;
    }
    result->result = subscribe(api, &subscriber);
    if (result->result != CUPTI_SUCCESS) {
        const bool taken = result->result == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS;
        result->outcome = taken ? KC_DETACH_SUBSCRIBED_ELSEWHERE : KC_DETACH_REFUSED;
        return;
    }
    detach.finalize = api->finalize;
    __atomic_store_n(&detach.phase, ARMED, __ATOMIC_SEQ_CST);
    result->outcome = await_finalize(api, subscriber, limit_ns);
    if (result->outcome == KC_DETACHED || result->outcome == KC_DETACH_REFUSED) {
        result->result = detach.result;
    }
    result->ns = (uint64_t)(clock_ns(CLOCK_MONOTONIC) - begin);
}
