/* Which runtime and driver calls are recorded.
 *
 * Nine in ten calls of a training loop are cudaGetDevice and the like, and recording each costs the target time. The
 * wanted ones are found by name (cuptiGetCallbackName), since their numbers differ between CUDA versions.
 * call_records.c records them through the subscriber.
 *
 * Threads: the agent's, before a recording.
 * Blocks: inside CUPTI while names are looked up.
 */
#include "cupti/call_filter.h"

#include <fnmatch.h>
#include <string.h>

/* There are gaps of unnamed numbers between named ones; this many in a row mark the end. */
#define GAP_MOST 64u

static const char GRAPH_CALLS[] = "cu*GraphLaunch*\0cu*GraphUpload*\0";
static const char LAUNCH_CALLS[] = "cuLaunch*\0cuGraphLaunch*\0";

static bool matches(const char *name, const char *patterns) {
    for (const char *pattern = patterns; *pattern != 0; pattern += strlen(pattern) + 1) {
        if (fnmatch(pattern, name, 0) == 0) {
            return true;
        }
    }
    return false;
}

static void select_domain(struct calls *calls, const struct cupti_api *api, struct arena *arena, uint32_t domain) {
    const uint32_t space = domain == CUPTI_DOMAIN_RUNTIME_API ? ARENA_SPACE_RUNTIME_API : ARENA_SPACE_DRIVER_API;
    for (uint32_t cbid = 1; cbid < CALLS_MOST && cbid - calls->last[domain] <= GAP_MOST; cbid++) {
        const char *name = NULL;
        const cupti_result result = api->get_callback_name(domain, cbid, &name);
        if (cbid == 1) {
            calls->names[domain] = result;
        }
        if (result != CUPTI_SUCCESS || name == NULL) {
            continue;
        }
        calls->last[domain] = cbid;
        calls->graph[domain][cbid] = matches(name, GRAPH_CALLS);
        if (domain == CUPTI_DOMAIN_DRIVER_API) {
            calls->launch[cbid] = matches(name, LAUNCH_CALLS);
        }
        if (matches(name, calls->patterns[domain])) {
            calls->keep[domain][cbid] = 1;
            calls->unnamed += !arena_add_string(arena, cbid, space, name, (uint32_t)strlen(name));
        }
    }
}

void calls_select(struct calls *calls, const struct cupti_api *api, struct arena *arena) {
    for (uint32_t domain = CUPTI_DOMAIN_DRIVER_API; domain <= CUPTI_DOMAIN_RUNTIME_API; domain++) {
        select_domain(calls, api, arena, domain);
    }
}

cupti_result calls_named(const struct calls *calls, uint32_t domain) {
    if (calls->last[domain] > 0) {
        return CUPTI_SUCCESS;
    }
    return calls->names[domain] != CUPTI_SUCCESS ? calls->names[domain] : CUPTI_ERROR_NOT_INITIALIZED;
}
