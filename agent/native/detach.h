/* Taking CUPTI out of the process again. */
#ifndef KINETO_DETACH_H
#define KINETO_DETACH_H

#include "cupti_api.h"
#include "kineto_collector.h"

/* Before the first activity is enabled. See detach.c. */
void detach_prepare(const struct cupti_api *api);

void detach_run(const struct cupti_api *api, int64_t limit_ns, struct kc_detach_result *result);

#endif
