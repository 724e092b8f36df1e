/* Other users of CUPTI in the process, as one recording sees them. */
#ifndef KINETO_OTHERS_H
#define KINETO_OTHERS_H

#include "cupti/cupti_api.h"
#include "cupti/collector.h"

/* A recording begins: from now on `give_way` is called as cupti_gate.h says. Who came before that has what he came
 * for when this returns, unless he gets no CPU time for long. */
void others_expect(struct cupti_api *api, void (*give_way)(void));
/* Looks at what they have enabled and registered. Once we have subscribed, before anything of ours is enabled. */
void others_count(const struct cupti_api *api);
void others_tell(struct kc_others *others);

#endif
