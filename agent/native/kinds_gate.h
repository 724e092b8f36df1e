/* Keeps kinds of CUPTI's activity off that a library enables on the calling thread. See kinds_gate.c. */
#ifndef KINETO_KINDS_GATE_H
#define KINETO_KINDS_GATE_H

#include <stddef.h>
#include <stdint.h>

#include "kineto_collector.h"

enum { KG_NOTHING = 1 }; /* the object is not loaded or does not call that function: no gate is up */

/* From now on cuptiActivityEnable does nothing for these kinds (numbers below 64) if the object whose file name is
 * `object` calls it on this thread. cupti: the loaded libcupti. Returns 0, KG_NOTHING, KC_LIBRARY, KC_SYSTEM, or
 * KC_ORDER if a gate is up. */
KC_EXPORT int kg_up(const char *object, const char *cupti, const uint32_t *kinds, uint32_t count, char *error,
                    size_t error_bytes);
/* As before. On the thread of kg_up. Returns the kinds that were kept off (bit n: kind n). */
KC_EXPORT uint64_t kg_down(void);

#endif
