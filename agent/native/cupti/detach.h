/* Detaching CUPTI from the process. */
#ifndef KINETO_DETACH_H
#define KINETO_DETACH_H

#include "cupti/cupti_api.h"
#include "cupti/collector.h"

/* Detaches at the end of the next CUDA call, within the limit; releases the subscription in any case. */
void detach_run(const struct cupti_api *api, int64_t limit_ns, struct kc_detach_result *result);
/* Ends the wait of a detach_run on another thread, unless cuptiFinalize has begun. */
void detach_expire(void);
/* The subscriber's callback at the end of a call. */
void detach_at_exit(void);
/* When a thread of the program that is still in cuptiFinalize entered it (Unix); 0: none is. On any thread. */
int64_t detach_since_ns(void);

#endif
