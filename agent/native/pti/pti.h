/* The collector's functions for PTI in addition to the kit's vendor (vendor.c): checks whether it may be used at all.
 * Driven by sources/pti/pti_binding.py, on the agent's thread.
 *
 *   kc_pti_look -> kc_pti_version -> (the version is one that is known) -> kc_pti_core -> the kit's functions
 */
#ifndef KINETO_PTI_H
#define KINETO_PTI_H

#include <stddef.h>
#include <stdint.h>

#include "common/export.h"

#define KC_PTI_ABI 1 /* changes with any signature below */

/* What kc_pti_core returns. */
enum { KC_PTI_READY = 0, KC_PTI_NO_CORE = 1, KC_PTI_UNGUARDED = 2 };

KC_EXPORT uint32_t kc_pti_abi(void);
/* Returns a level_zero_state, with a text for all but LEVEL_ZERO_READY. PTI is not called. */
KC_EXPORT int kc_pti_look(char *error, size_t error_bytes);
/* Loads the library at `path`, unless the process has it, and stores its version. Nothing else of it is called. Returns
 * 0, or a negative kc_error with a text. */
KC_EXPORT int kc_pti_version(const char *path, char *version, size_t version_bytes, char *error, size_t error_bytes);
/* Makes PTI load its core library. */
KC_EXPORT int kc_pti_core(char *error, size_t error_bytes);

#endif
