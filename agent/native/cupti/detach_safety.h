/* Whether CUPTI may be detached from this process. */
#ifndef KINETO_ATTACHMENT_H
#define KINETO_ATTACHMENT_H

#include <stdbool.h>
#include <stdint.h>

#include "cupti/cupti_api.h"

/* Call before our buffer callbacks are registered: notes the registered ones. */
void attachment_begins(const struct cupti_api *api);
/* Called before and after GPU activities are recorded, on the thread that calls the collector. `watched`: our
 * subscriber's callbacks reported the launches of graphs for the whole of that time. */
void attachment_recording_begins(void);
void attachment_recording_ends(bool watched);
/* The subscriber's callback for the launch of a graph. On any thread. */
void attachment_graph_launched(void);
/* Bits of kc_stay: why CUPTI must stay attached in this process; 0 if it need not. */
uint32_t attachment_must_stay(void);

#endif
