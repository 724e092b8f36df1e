/* CUPTI's only subscriber, while it is ours: call records during a recording, then the detach.
 *
 * Theory of operation
 *   CUPTI has one subscriber per process; a second cuptiSubscribe is refused (39). We hold it from the beginning of a
 *   recording to the detach, and release it at once when torch's profiler starts (kc_yield): a Kineto that finds it
 *   taken gives up GPU activities for the life of the process.
 *
 *   The process's first subscription comes before the first activity is enabled: CUPTI makes the tables that its hooks
 *   read while it subscribes, and a CUDA call of another thread that comes in between reads through a null pointer. On
 *   an H200 with libcupti 13.0, one in three processes that subscribed for the first time after recording crashed this
 *   way (162 of 470). Some hooks are in place before any subscription, so callback_tables.c gives them empty tables.
 *
 * Threads: the callback runs on every thread of the program that makes a CUDA call, inside the call; the rest on the
 *   thread that has the turn.
 * Blocks: the callback never does, unless a detach is armed: then cuptiFinalize runs in it. The rest may block inside
 *   CUPTI.
 */
#include "cupti/subscription.h"

#include <stddef.h>

#include "cupti/detach_safety.h"
#include "cupti/detach.h"
#include "cupti/call_records.h"
#include "cupti/launches.h"

static void *subscriber; /* NULL: not ours */
/* What to do at each call. A callback of the previous subscription may still read it while it is written. */
enum { TELL_OF_GRAPH = 1, RECORD = 2, NOTE_CONTEXT = 4 };
static uint8_t wanted[CALLS_DOMAINS][CALLS_MOST];

static void on_call(void *user, uint32_t domain, uint32_t cbid, const void *data) {
    const struct cupti_call *call = data;
    (void)user;
    if (domain != CUPTI_DOMAIN_DRIVER_API && domain != CUPTI_DOMAIN_RUNTIME_API) {
        return;
    }
    const uint8_t todo = cbid < CALLS_MOST ? __atomic_load_n(&wanted[domain][cbid], __ATOMIC_RELAXED) : 0;
    if ((todo & TELL_OF_GRAPH) != 0) {
        attachment_graph_launched();
    }
    if (call->site != CUPTI_API_EXIT) {
        if (todo != 0) {
            context_note(call->context);
        }
        if ((todo & RECORD) != 0) {
            records_enter(domain, cbid, call);
        }
        return;
    }
    if ((todo & RECORD) != 0) {
        records_exit(domain, cbid, call);
    }
    detach_at_exit();
}

cupti_result subscription_open(const struct cupti_api *api) {
    void *made = NULL;
    for (uint32_t i = 0; i < CALLS_DOMAINS * CALLS_MOST; i++) {
        __atomic_store_n(&wanted[0][0] + i, 0, __ATOMIC_RELAXED);
    }
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

/* Enables callbacks for the calls of a domain that are marked in its table, with this action. A libcupti that is newer
 * than the driver names calls that the driver lacks and refuses their callbacks; no one can make such a call. */
static cupti_result enable_calls(const struct cupti_api *api, void *held, uint32_t domain, const uint8_t *marked,
                                 uint8_t todo) {
    bool any = false;
    cupti_result unknown = CUPTI_SUCCESS;
    for (uint32_t cbid = 1; cbid < CALLS_MOST; cbid++) {
        if (!marked[cbid]) {
            continue;
        }
        (void)__atomic_fetch_or(&wanted[domain][cbid], todo, __ATOMIC_SEQ_CST);
        const cupti_result result = api->enable_callback(1, held, domain, cbid);
        if (result == CUPTI_SUCCESS) {
            any = true;
        } else if (result == CUPTI_ERROR_INVALID_PARAMETER) {
            unknown = result;
        } else {
            return result;
        }
    }
    return any ? CUPTI_SUCCESS : unknown;
}

cupti_result subscription_watch_graphs(const struct cupti_api *api, const struct calls *calls) {
    void *held = __atomic_load_n(&subscriber, __ATOMIC_SEQ_CST);
    cupti_result result = held == NULL ? CUPTI_ERROR_MULTIPLE_SUBSCRIBERS : calls_named(calls, CUPTI_DOMAIN_DRIVER_API);
    for (uint32_t domain = CUPTI_DOMAIN_DRIVER_API; domain <= CUPTI_DOMAIN_RUNTIME_API && result == CUPTI_SUCCESS;
         domain++) {
        result = enable_calls(api, held, domain, calls->graph[domain], TELL_OF_GRAPH);
    }
    /* Includes the runtime's launches: they call the driver's. If it fails, fewer contexts are checked. */
    if (result == CUPTI_SUCCESS) {
        (void)enable_calls(api, held, CUPTI_DOMAIN_DRIVER_API, calls->launch, NOTE_CONTEXT);
    }
    return result;
}

static cupti_result follow_domain(const struct cupti_api *api, void *held, const struct calls *calls, uint32_t domain) {
    if (calls->patterns[domain][0] == 0) {
        return CUPTI_SUCCESS;
    }
    const cupti_result named = calls_named(calls, domain);
    return named != CUPTI_SUCCESS ? named : enable_calls(api, held, domain, calls->keep[domain], RECORD);
}

cupti_result subscription_follow(const struct cupti_api *api, const struct calls *calls) {
    void *held = __atomic_load_n(&subscriber, __ATOMIC_SEQ_CST);
    if (held == NULL) {
        return CUPTI_ERROR_MULTIPLE_SUBSCRIBERS;
    }
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
