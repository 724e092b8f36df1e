/* Our threads that are inside C++ when the interpreter ends. Driven by sources/jax/xla_session.py. */
#ifndef KINETO_EXIT_GUARD_H
#define KINETO_EXIT_GUARD_H

#include "common/export.h"

#define KC_EXIT_GUARD_ABI 1 /* changes with any signature below */

KC_EXPORT uint32_t kc_exit_guard_abi(void);
/* Looks up what kc_exit_guard_place needs. Returns 0, or 1 if the process has no C++ library, so nothing to guard. */
KC_EXPORT int kc_exit_guard_prepare(void);
/* From now on a thread of ours for which C++ would end the process stands still. Called as the process exits. */
KC_EXPORT void kc_exit_guard_place(void);

#endif
