/* Which runtime and driver calls are recorded. */
#ifndef KINETO_CALLS_H
#define KINETO_CALLS_H

#include "common/arena.h"
#include "cupti/cupti_api.h"

#define CALLS_MOST 2048u /* CUDA 13.4 has 868 driver and 566 runtime call numbers */
#define CALLS_DOMAINS 3u

#define CALLS_PATTERNS_BYTES 2048u

struct calls {
    char patterns[CALLS_DOMAINS][CALLS_PATTERNS_BYTES]; /* each ends with NUL, the list with an empty one */
    uint8_t keep[CALLS_DOMAINS][CALLS_MOST];
    uint8_t graph[CALLS_DOMAINS][CALLS_MOST]; /* the call launches a graph, or prepares one for launching */
    uint8_t launch[CALLS_MOST];               /* the driver call launches a kernel or a graph */
    uint32_t last[CALLS_DOMAINS];             /* highest call number with a name; 0: CUPTI has no names */
    cupti_result names[CALLS_DOMAINS];        /* CUPTI's result for the first name */
    uint64_t unnamed;                         /* names that did not fit the string table */
};

/* Finds the calls that launch graphs, and the calls of each domain that match its patterns; adds the names of the
 * latter to the arena. CUPTI has names only once it is initialised, that is after cuptiActivityRegisterCallbacks. */
void calls_select(struct calls *calls, const struct cupti_api *api, struct arena *arena);
/* CUPTI_SUCCESS if the calls of a domain have names, else CUPTI's error. Records of calls without names are useless. */
cupti_result calls_named(const struct calls *calls, uint32_t domain);

#endif
