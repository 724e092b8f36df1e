/* Detaching CUPTI from the process.
 *
 * Theory of operation
 *   Disabling activities leaves CUPTI's hooks in every CUDA call (training stays 7-28 % slower); only cuptiFinalize
 *   removes them, and it is safe only inside the end of a CUDA call. So: ask the subscription for callbacks of the
 *   whole runtime and driver API, and finalize at the first end of a call, on the thread that makes it. Finalizing ends
 *   the subscription too. There is no detach without the subscription (another tool has CUPTI's only one), nor if
 *   detach_safety.c reports that finalizing could end the program.
 *
 *   The requester waits with a limit, or until another thread cancels it (kc_hurry). One word decides the race between
 *   that and a callback:
 *
 *     ARMED -> FINALIZING -> FINALIZED   (a callback won)
 *     ARMED -> EXPIRED                   (the time-out won: no callback will finalize any more)
 *
 * Threads: detach_run runs on the agent's; detach_at_exit on the thread that ends a CUDA call; detach_expire on any.
 * Blocks: detach_run waits up to its limit, and for cuptiFinalize up to a limit of its own. The thread that finalizes
 *   is inside CUPTI until that returns.
 */
#define _GNU_SOURCE
#include "cupti/detach.h"

#include <stdbool.h>
#include <string.h>
#include <time.h>

#include "cupti/detach_safety.h"
#include "cupti/launches.h"
#include "cupti/subscription.h"
#include "common/wake.h"

/* cuptiFinalize took 0.01-8 ms; a callback that has begun it gets this long on top of the limit. */
#define FINALIZE_LIMIT_NS 3000000000LL
#define HOLD_NS 20000000LL    /* launches of other threads are held this long while it runs, */
#define STARVED_NS 20000000LL /* and pause again if it does not return (launches.h) */

enum phase { IDLE, ARMED, FINALIZING, FINALIZED, EXPIRED };

static struct {
    uint32_t phase;
    int64_t since_ns; /* Unix; of FINALIZING */
    cupti_result result;
    cupti_result (*finalize)(void);
    struct wake done;
} detach;

static bool advance(uint32_t from, uint32_t to) {
    return __atomic_compare_exchange_n(&detach.phase, &from, to, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

static uint32_t phase_now(void) { return __atomic_load_n(&detach.phase, __ATOMIC_SEQ_CST); }

void detach_at_exit(void) {
    /* Read first: this runs at the end of every recorded call, and a locked instruction would slow them all. */
    if (__atomic_load_n(&detach.phase, __ATOMIC_RELAXED) == ARMED && advance(ARMED, FINALIZING)) {
        __atomic_store_n(&detach.since_ns, clock_ns(CLOCK_REALTIME), __ATOMIC_SEQ_CST);
        const int64_t held = launches_hold(HOLD_NS);
        detach.result = detach.finalize();
        launches_release(held);
        __atomic_store_n(&detach.phase, FINALIZED, __ATOMIC_SEQ_CST);
        wake_post(&detach.done);
    }
}

int64_t detach_since_ns(void) {
    return phase_now() == FINALIZING ? __atomic_load_n(&detach.since_ns, __ATOMIC_SEQ_CST) : 0;
}

void detach_expire(void) {
    if (advance(ARMED, EXPIRED)) {
        wake_post(&detach.done);
    }
}

/* Returns false if it is still `phase` after the limit. */
static bool wait_while(uint32_t phase, int64_t limit_ns) {
    const int64_t deadline = clock_ns(CLOCK_MONOTONIC) + limit_ns;
    for (;;) {
        const uint32_t seen = wake_seen(&detach.done);
        if (phase_now() != phase) {
            return true;
        }
        const int64_t left = deadline - clock_ns(CLOCK_MONOTONIC);
        if (left <= 0) {
            return false;
        }
        wake_wait(&detach.done, seen, left);
    }
}

static bool is_finalized(void *unused_argument) {
    (void)unused_argument;
    return phase_now() != FINALIZING;
}

static int32_t await_finalize(int64_t limit_ns) {
    struct launch_pauses pauses = {0, 0};
    (void)wait_while(ARMED, limit_ns);
    if (advance(ARMED, EXPIRED) || phase_now() == EXPIRED) {
        return KC_DETACH_NO_CALL;
    }
    const int64_t deadline = clock_ns(CLOCK_MONOTONIC) + FINALIZE_LIMIT_NS;
    while (!wait_while(FINALIZING, STARVED_NS)) {
        if (clock_ns(CLOCK_MONOTONIC) > deadline) {
            return KC_DETACH_STUCK;
        }
        launches_pause(&pauses, is_finalized, NULL);
    }
    return detach.result == CUPTI_SUCCESS ? KC_DETACHED : KC_DETACH_REFUSED;
}

void detach_run(const struct cupti_api *api, int64_t limit_ns, struct kc_detach_result *result) {
    const int64_t begin = clock_ns(CLOCK_MONOTONIC);
    memset(result, 0, sizeof *result);
    if (phase_now() == FINALIZING) {
        result->outcome = KC_DETACH_STUCK; /* since an earlier request */
        return;
    }
    const uint32_t reasons = attachment_must_stay();
    if (reasons != 0 && subscription_held()) {
        result->outcome = KC_DETACH_MUST_STAY;
        result->result = (int32_t)reasons;
        subscription_close(api);
        return;
    }
    /* Nothing is armed yet: no callback can finalize CUPTI while this call is inside it. */
    result->result = subscription_follow_all(api, true);
    if (result->result != CUPTI_SUCCESS) {
        const bool taken = result->result == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS;
        result->outcome = taken ? KC_DETACH_SUBSCRIBED_ELSEWHERE : KC_DETACH_REFUSED;
        subscription_close(api);
        return;
    }
    detach.finalize = api->finalize;
    __atomic_store_n(&detach.since_ns, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&detach.phase, ARMED, __ATOMIC_SEQ_CST);
    result->outcome = await_finalize(limit_ns);
    if (result->outcome == KC_DETACHED || result->outcome == KC_DETACH_STUCK) {
        subscription_forget(); /* gone, or going while cuptiFinalize runs */
    } else {
        subscription_close(api);
    }
    if (result->outcome == KC_DETACHED || result->outcome == KC_DETACH_REFUSED) {
        result->result = detach.result;
    }
    result->ns = (uint64_t)(clock_ns(CLOCK_MONOTONIC) - begin);
}
