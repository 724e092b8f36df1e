/* The collectors of this process. */
#ifndef KINETO_KIT_COLLECTOR_SLOTS_H
#define KINETO_KIT_COLLECTOR_SLOTS_H

#include "kit/collector.h"

#define COLLECTORS_MOST 8u

/* Gives a collector its host and calls it at forks, for the life of the process. Returns its number, or -1 if there are
 * too many. On the agent's thread. */
int collectors_add(struct kit_collector *collector);
/* NULL if there is no such number. */
struct kit_collector *collectors_get(int number);
/* Registers one more exit handler for a collector: handlers run in the reverse order of their registration. */
void collectors_hook_exit(const struct kit_collector *collector);

#endif
