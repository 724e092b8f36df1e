/* See other_users.h.
 *
 * Threads: the agent's.
 * Blocks: others_expect waits in gate_settle, 0.4 s at most.
 */
#include "cupti/other_users.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "cupti/cupti_gate.h"
#include "cupti/buffer_callbacks.h"

static struct {
    uint64_t listener;
    uint32_t in_use;
    bool ended;
    const char *unnoticed;
} seen = {.unnoticed = ""};

void others_expect(struct cupti_api *api, void (*give_way)(void)) {
    seen.in_use = 0;
    seen.listener = 0;
    seen.unnoticed = gate_place(api, give_way);
    gate_arm();
    gate_settle();
}

void others_count(const struct cupti_api *api) {
    uint32_t count = 0;
    if (api->get_enabled_kinds != NULL && api->get_enabled_kinds(NULL, NULL, NULL, &count) == CUPTI_SUCCESS) {
        seen.in_use = count;
        return;
    }
    seen.in_use = gate_in_use();
    seen.ended = gate_ended();
    seen.listener = listener_registered(api);
}

void others_tell(struct kc_others *others) {
    const struct gate_visit visit = gate_visit();
    if (visit.time_ns != 0) {
        others->time_ns = visit.time_ns;
        others->caller = visit.caller;
        snprintf(others->function, sizeof others->function, "%s", visit.function);
    }
    others->listener = seen.listener;
    others->in_use = seen.in_use;
    others->ended = seen.ended;
    snprintf(others->unnoticed, sizeof others->unnoticed, "%s", seen.unnoticed);
}
