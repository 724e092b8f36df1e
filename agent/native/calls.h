/* Which runtime and driver calls are recorded. */
#ifndef KINETO_CALLS_H
#define KINETO_CALLS_H

#include "arena.h"
#include "cupti_api.h"

#define CALLS_MOST 2048u /* CUDA 13.4 has 868 driver and 566 runtime call numbers */
#define CALLS_DOMAINS 3u

struct calls {
    uint8_t keep[CALLS_DOMAINS][CALLS_MOST];
    uint32_t last[CALLS_DOMAINS]; /* highest call number with a name; 0: no selection, record all */
    uint64_t unnamed;             /* names that did not fit the string table */
};

/* Chooses the calls of one domain by patterns and names them in the arena; returns how many are kept. */
int calls_select(struct calls *calls, const struct cupti_api *api, struct arena *arena, uint32_t domain,
                 const char *patterns);
/* Enables the activity kind of a domain for the chosen calls alone. Returns CUPTI's answer for the kind. */
cupti_result calls_enable(const struct calls *calls, const struct cupti_api *api, uint32_t kind);

#endif
