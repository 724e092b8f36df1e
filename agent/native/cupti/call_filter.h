/* Which runtime and driver calls are recorded. */
#ifndef KINETO_CALLS_H
#define KINETO_CALLS_H

#include "common/arena.h"
#include "cupti/cupti_api.h"

#define CALLS_MOST 2048u /* CUDA 13.4 has 868 driver and 566 runtime call numbers */
#define CALLS_DOMAINS 3u

#define CALLS_PATTERNS_BYTES 2048u

struct calls {
    char patterns[CALLS_DOMAINS][CALLS_PATTERNS_BYTES]; /* each ended by NUL, the list by an empty one */
    uint8_t keep[CALLS_DOMAINS][CALLS_MOST];
    uint8_t graph[CALLS_DOMAINS][CALLS_MOST]; /* the call launches a graph, or readies one for it */
    uint32_t last[CALLS_DOMAINS];             /* highest call number with a name; 0: CUPTI gives no names */
    cupti_result names[CALLS_DOMAINS];        /* its answer when asked for the first one */
    uint64_t unnamed;                         /* names that did not fit the string table */
};

/* Finds the calls that launch graphs, and the calls of each domain that match its patterns; names these in the arena.
 * CUPTI gives names only once it is initialised, that is after cuptiActivityRegisterCallbacks. */
void calls_select(struct calls *calls, const struct cupti_api *api, struct arena *arena);
/* Whether the calls of a domain have names: without them, recording any would be of no use to anybody. Returns
 * CUPTI's reason if not. */
cupti_result calls_named(const struct calls *calls, uint32_t domain);

#endif
