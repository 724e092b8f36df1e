/* Keeps Kineto off CUPTI on the calling thread. See kineto_gate.c. */
#ifndef KINETO_KINETO_GATE_H
#define KINETO_KINETO_GATE_H

#include <stddef.h>

#include "common/export.h"

enum { KC_GATE_NOTHING = 1 }; /* the object is not loaded or does not call these functions: no gate is up */

/* Makes CUPTI's functions that change what is recorded (EACH_GATE) succeed without effect if the object with file name
 * `object` calls them on this thread. cupti: the loaded libcupti. Returns 0, KC_GATE_NOTHING, KC_LIBRARY, KC_SYSTEM, or
 * KC_ORDER if a gate is up. */
KC_EXPORT int kc_gate_up(const char *object, const char *cupti, char *error, size_t error_bytes);
/* Undoes kc_gate_up, on the same thread. Returns the number of calls that were suppressed. */
KC_EXPORT uint64_t kc_gate_down(void);

#endif
