/* CUPTI's only subscriber, while it is ours: call records during a recording, then the detach. */
#ifndef KINETO_SUBSCRIPTION_H
#define KINETO_SUBSCRIPTION_H

#include <stdbool.h>

#include "cupti/call_filter.h"
#include "cupti/cupti_api.h"

/* Subscribes unless subscribed. Must come before the first activity is enabled: see subscription.c. */
cupti_result subscription_open(const struct cupti_api *api);
bool subscription_held(void);
/* Enables callbacks for graph launches, which are reported to detach_safety.h. */
cupti_result subscription_watch_graphs(const struct cupti_api *api, const struct calls *calls);
/* Enables callbacks for the chosen calls, too. */
cupti_result subscription_follow(const struct cupti_api *api, const struct calls *calls);
/* Enables callbacks for every runtime and driver call, or for none. */
cupti_result subscription_follow_all(const struct cupti_api *api, bool follow);
/* Releases the subscriber, for another tool or at the end. On any thread. */
void subscription_close(const struct cupti_api *api);
/* CUPTI is finalized: the subscriber goes with it. */
void subscription_forget(void);

#endif
