/* Other users of CUPTI in the process, as one recording sees them. */
#ifndef KINETO_OTHERS_H
#define KINETO_OTHERS_H

#include "cupti/cupti_api.h"
#include "cupti/collector.h"

/* A recording begins: from now on `give_way` is called as described in cupti_gate.h. Calls that came earlier have
 * finished when this returns, unless their thread gets no CPU time for long. */
void others_expect(struct cupti_api *api, void (*give_way)(void));
/* Notes what they have enabled and registered. Call once we have subscribed, before we enable anything. */
void others_count(const struct cupti_api *api);
void others_tell(struct kc_others *others);

#endif
