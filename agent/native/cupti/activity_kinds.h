/* The activity kinds that a recording has switched on. */
#ifndef KINETO_KINDS_H
#define KINETO_KINDS_H

#include "cupti/cupti_api.h"

#define KINDS_MOST 16u

struct kinds {
    uint32_t enabled[KINDS_MOST];
    uint32_t count;
};

/* Enables each of `wanted`, at most KINDS_MOST, and stores CUPTI's result in results[i]. */
void kinds_enable(struct kinds *kinds, const struct cupti_api *api, const uint32_t *wanted, uint32_t count,
                  int32_t *results);
/* Disables the enabled kinds. */
void kinds_disable(const struct kinds *kinds, const struct cupti_api *api);

#endif
