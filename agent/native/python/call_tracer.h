/* Records every call of a Python or C function by Python code, with the interpreter's profile hook, into its own arena.
 *
 * One recording at a time, in this order; functions marked (GIL) are called by a Python thread that holds it:
 *
 *   kc_tracer_prepare -> kc_tracer_leave_out (GIL)* -> kc_tracer_start (GIL)
 *     -> kc_tracer_look (GIL)*, kc_tracer_counts* -> kc_tracer_stop (GIL) -> kc_tracer_close
 *
 * Functions return 0 (or what their comments say) on success and a negative kc_error otherwise; those with an `error`
 * buffer put a text into it. A forked child calls kc_tracer_forked (GIL) and begins anew.
 */
#ifndef KINETO_PYTHON_CALLS_H
#define KINETO_PYTHON_CALLS_H

#include <stddef.h>
#include <stdint.h>

#include "common/export.h"

#define KC_TRACER_ABI 4 /* changes with any signature or structure below */

struct kc_tracer_config {
    uint64_t buffer_limit_bytes;
    uint64_t buffer_bytes;
    uint64_t strings_bytes;
    uint64_t prefault_bytes;
    uint64_t modules_only; /* 1: only calls of torch.nn.Module.__call__; 0: every call */
};

struct kc_tracer_result {
    struct kc_counts counts;
    uint64_t threads;    /* recorded threads */
    uint64_t others;     /* threads left alone: they have the program's own profile function, or a hook refused */
    uint64_t crowded;    /* threads left alone: the maximum number had been recorded before them */
    uint64_t names_lost; /* calls whose names did not fit the string table */
    uint64_t elsewhere;  /* 1: there were other interpreters, whose threads cannot be recorded; else 0 */
    uint64_t full_ns;    /* Unix ns when no buffer was free and recording ended; 0: never */
};

KC_EXPORT uint32_t kc_tracer_abi(void);
/* Finds the interpreter's functions; returns 0 if this interpreter can be recorded. */
KC_EXPORT int kc_tracer_open(char *error, size_t error_bytes);
/* Makes the arena; returns its descriptor. */
KC_EXPORT int kc_tracer_prepare(const struct kc_tracer_config *config, char *error, size_t error_bytes);
/* Excludes the calling thread from the recording. */
KC_EXPORT int kc_tracer_leave_out(void);
/* module_call: the code object of torch.nn.Module.__call__, or NULL. */
KC_EXPORT int kc_tracer_start(void *module_call, char *error, size_t error_bytes);
/* Records threads that have begun since, too; releases those that have another profile function now. */
KC_EXPORT int kc_tracer_look(void);
KC_EXPORT int kc_tracer_counts(struct kc_counts *counts);
KC_EXPORT int kc_tracer_stop(struct kc_tracer_result *result);
KC_EXPORT int kc_tracer_close(void);
KC_EXPORT int kc_tracer_forked(void);

#endif
