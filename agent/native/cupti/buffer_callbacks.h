/* Which buffer callbacks are registered with CUPTI. */
#ifndef KINETO_LISTENER_H
#define KINETO_LISTENER_H

#include "cupti/cupti_api.h"

/* The address of the registered callback for requested buffers; 0: none, ours, or unknown. The registration is the same
 * afterwards. Call between our recordings. */
uint64_t listener_registered(const struct cupti_api *api);
/* Registers the callbacks again that the last listener_registered found, if any: their owner may register only once per
 * process. Call when CUPTI has none of our buffers. */
void listener_restore(const struct cupti_api *api);

#endif
