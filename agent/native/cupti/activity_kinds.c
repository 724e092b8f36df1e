/* See activity_kinds.h.
 *
 * Threads: the one that has the turn (collector_turn.h): the agent's, or one to which the agent yields.
 * Blocks: inside CUPTI, which may take its own locks.
 */
#include "cupti/activity_kinds.h"

#include <stdbool.h>

void kinds_enable(struct kinds *kinds, const struct cupti_api *api, const uint32_t *wanted, uint32_t count,
                  int32_t *results) {
    /* If copies are enabled and kernels are not, CUPTI loses kernels later on (sources/cupti/gpu_activities.py). */
    const bool kernels = count == 0 || wanted[0] == CUPTI_KIND_CONCURRENT_KERNEL;
    if (!kernels) {
        (void)api->enable(CUPTI_KIND_CONCURRENT_KERNEL);
    }
    kinds->count = 0;
    for (uint32_t i = 0; i < count; i++) {
        results[i] = api->enable(wanted[i]);
        if (results[i] == CUPTI_SUCCESS) {
            kinds->enabled[kinds->count++] = wanted[i];
        }
    }
    if (!kernels) {
        (void)api->disable(CUPTI_KIND_CONCURRENT_KERNEL);
    }
}

void kinds_disable(const struct kinds *kinds, const struct cupti_api *api) {
    for (uint32_t i = kinds->count; i-- > 0;) { /* the last enabled first */
        (void)api->disable(kinds->enabled[i]);
    }
}
