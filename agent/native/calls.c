/* Which runtime and driver calls are recorded.
 *
 * CUPTI records every call of a domain once its kind is enabled; of those of a training loop nine in ten are
 * cudaGetDevice and the like, and each costs the target time. The unwanted ones are switched off one by one,
 * by their numbers, which differ between CUDA versions: cuptiGetCallbackName gives the names. Enabling the
 * kind switches all on again (CUPTI's documentation), hence once before, so that no burst of unwanted records
 * comes in between where a version keeps the setting, and once after.
 */
#include "calls.h"

#include <fnmatch.h>
#include <string.h>

/* Numbers without a name between named ones exist; this many in a row mark the end. */
#define GAP_MOST 64u

static bool matches(const char *name, const char *patterns) {
    for (const char *pattern = patterns; *pattern != 0; pattern += strlen(pattern) + 1) {
        if (fnmatch(pattern, name, 0) == 0) {
            return true;
        }
    }
    return false;
}

static const char *name_of(const struct cupti_api *api, uint32_t domain, uint32_t cbid) {
    const char *name = NULL;
    return api->get_callback_name(domain, cbid, &name) == CUPTI_SUCCESS ? name : NULL;
}

int calls_select(struct calls *calls, const struct cupti_api *api, struct arena *arena, uint32_t domain,
                 const char *patterns) {
    const uint32_t space =
        domain == CUPTI_DOMAIN_RUNTIME_API ? ARENA_SPACE_RUNTIME_API : ARENA_SPACE_DRIVER_API;
    int kept = 0;
    memset(calls->keep[domain], 0, sizeof calls->keep[domain]);
    for (uint32_t cbid = 1; cbid < CALLS_MOST && cbid - calls->last[domain] <= GAP_MOST; cbid++) {
        const char *name = name_of(api, domain, cbid);
        if (name == NULL) {
            continue;
        }
        calls->last[domain] = cbid;
        if (matches(name, patterns)) {
            calls->keep[domain][cbid] = 1;
            calls->unnamed += !arena_add_string(arena, cbid, space, name, (uint32_t)strlen(name));
            kept++;
        }
    }
    return kept;
}

static void switch_off_others(const struct calls *calls, const struct cupti_api *api, uint32_t domain) {
    for (uint32_t cbid = 1; cbid <= calls->last[domain]; cbid++) {
        if (calls->keep[domain][cbid]) {
            continue;
        }
        if (domain == CUPTI_DOMAIN_RUNTIME_API) {
            (void)api->enable_runtime_api(cbid, 0); /* numbers without a call are refused: no harm */
        } else {
            (void)api->enable_driver_api(cbid, 0);
        }
    }
}

cupti_result calls_enable(const struct calls *calls, const struct cupti_api *api, uint32_t kind) {
    const uint32_t domain = kind == CUPTI_KIND_RUNTIME ? CUPTI_DOMAIN_RUNTIME_API : CUPTI_DOMAIN_DRIVER_API;
    switch_off_others(calls, api, domain);
    const cupti_result result = api->enable(kind);
    if (result == CUPTI_SUCCESS) {
        switch_off_others(calls, api, domain);
    }
    return result;
}
