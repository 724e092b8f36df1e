/* CUPTI's one subscriber, while it is ours: call records during a recording, then the detach.
 *
 * Theory of operation
 *   CUPTI has one subscriber per process; a second cuptiSubscribe is refused (39). We hold it from the beginning
 *   of a recording to the detach, and let go at once when torch's profiler starts (kc_yield): a Kineto that
 *   finds it taken gives up GPU activities for the life of the process.
 *
 *   The process's first subscription must come before CUPTI's hooks are in place, that is before the first
 *   activity is enabled: CUPTI makes the tables that its hooks read while it enables a subscriber's domains,
 *   and a CUDA call of another thread that comes in between reads through a null pointer. On an H200 with
 *   libcupti 13.0, one of three processes that subscribed for the first time after recording crashed so
 *   (162 of 470); none that had subscribed once before did (0 of 168, and 0 of 1,680 later subscriptions).
 */
#include "subscription.h"

#include <stddef.h>

#include "attachment.h"
#include "detach.h"
#include "records.h"

static void *subscriber; /* NULL: not ours */
static const struct calls *watched;  /* whose graph calls are told of */
static const struct calls *recorded; /* whose chosen calls are recorded */

static void on_call(void *user, uint32_t domain, uint32_t cbid, const void *data) {
    const struct cupti_call *call = data;
    (void)user;
    if (domain != CUPTI_DOMAIN_DRIVER_API && domain != CUPTI_DOMAIN_RUNTIME_API) {
        return;
    }
    const struct calls *graphs = __atomic_load_n(&watched, __ATOMIC_RELAXED);
    const struct calls *chosen = __atomic_load_n(&recorded, __ATOMIC_RELAXED);
    if (graphs != NULL && cbid < CALLS_MOST && graphs->graph[domain][cbid] != 0) {
        attachment_graph_launched();
    }
    const bool keep = chosen != NULL && cbid < CALLS_MOST && chosen->keep[domain][cbid] != 0;
    if (call->site != CUPTI_API_EXIT) {
        if (keep) {
            records_enter(domain, cbid, call);
        }
        return;
    }
    if (keep) {
        records_exit(domain, cbid, call);
    }
    detach_at_exit();
}

cupti_result subscription_open(const struct cupti_api *api) {
    void *made = NULL;
    __atomic_store_n(&watched, NULL, __ATOMIC_SEQ_CST); /* of the recording before */
    __atomic_store_n(&recorded, NULL, __ATOMIC_SEQ_CST);
    if (subscription_held()) {
        return CUPTI_SUCCESS;
    }
    const cupti_result result = api->subscribe(&made, on_call, NULL);
    if (result == CUPTI_SUCCESS) {
        __atomic_store_n(&subscriber, made, __ATOMIC_SEQ_CST);
    }
    return result;
}

bool subscription_held(void) { return __atomic_load_n(&subscriber, __ATOMIC_SEQ_CST) != NULL; }

/* Callbacks for the calls of a domain that are marked in its table. */
static cupti_result enable_calls(const struct cupti_api *api, void *held, const struct calls *calls, uint32_t domain,
                                 const uint8_t *marked) {
    cupti_result result = CUPTI_SUCCESS;
    for (uint32_t cbid = 1; cbid <= calls->last[domain] && result == CUPTI_SUCCESS; cbid++) {
        if (marked[cbid]) {
            result = api->enable_callback(1, held, domain, cbid);
        }
    }
    return result;
}

cupti_result subscription_watch_graphs(const struct cupti_api *api, const struct calls *calls) {
    void *held = __atomic_load_n(&subscriber, __ATOMIC_SEQ_CST);
    cupti_result result = held == NULL ? CUPTI_ERROR_MULTIPLE_SUBSCRIBERS : calls_named(calls, CUPTI_DOMAIN_DRIVER_API);
    __atomic_store_n(&watched, calls, __ATOMIC_SEQ_CST);
    for (uint32_t domain = CUPTI_DOMAIN_DRIVER_API; domain <= CUPTI_DOMAIN_RUNTIME_API && result == CUPTI_SUCCESS;
         domain++) {
        result = enable_calls(api, held, calls, domain, calls->graph[domain]);
    }
    return result;
}

static cupti_result follow_domain(const struct cupti_api *api, void *held, const struct calls *calls,
                                  uint32_t domain) {
    if (calls->patterns[domain][0] == 0) {
        return CUPTI_SUCCESS;
    }
    const cupti_result named = calls_named(calls, domain);
    return named != CUPTI_SUCCESS ? named : enable_calls(api, held, calls, domain, calls->keep[domain]);
}

cupti_result subscription_follow(const struct cupti_api *api, const struct calls *calls) {
    void *held = __atomic_load_n(&subscriber, __ATOMIC_SEQ_CST);
    if (held == NULL) {
        return CUPTI_ERROR_MULTIPLE_SUBSCRIBERS;
    }
    __atomic_store_n(&recorded, calls, __ATOMIC_SEQ_CST);
    const cupti_result runtime = follow_domain(api, held, calls, CUPTI_DOMAIN_RUNTIME_API);
    return runtime != CUPTI_SUCCESS ? runtime : follow_domain(api, held, calls, CUPTI_DOMAIN_DRIVER_API);
}

cupti_result subscription_follow_all(const struct cupti_api *api, bool follow) {
    void *held = __atomic_load_n(&subscriber, __ATOMIC_SEQ_CST);
    if (held == NULL) {
        return CUPTI_ERROR_MULTIPLE_SUBSCRIBERS;
    }
    const cupti_result runtime = api->enable_domain(follow, held, CUPTI_DOMAIN_RUNTIME_API);
    const cupti_result driver = api->enable_domain(follow, held, CUPTI_DOMAIN_DRIVER_API);
    return runtime == CUPTI_SUCCESS || driver == CUPTI_SUCCESS ? CUPTI_SUCCESS : runtime;
}

void subscription_close(const struct cupti_api *api) {
    void *held = __atomic_exchange_n(&subscriber, NULL, __ATOMIC_SEQ_CST);
    if (held != NULL) {
        (void)api->unsubscribe(held); /* ends its callbacks, too */
    }
}

void subscription_forget(void) { __atomic_store_n(&subscriber, NULL, __ATOMIC_SEQ_CST); }
