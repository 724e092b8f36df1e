/* Every call of Python and of what Python calls, by the interpreter's own profile function, into an arena of its own.
 *
 * One recording at a time, in this order; functions marked (GIL) are called by a Python thread that holds it:
 *
 *   kp_prepare -> kp_leave_out (GIL)* -> kp_start (GIL) -> kp_look (GIL)*, kp_counts* -> kp_stop (GIL) -> kp_close
 *
 * Functions return 0 (or what is said) on success and a negative kp_error otherwise; those with an `error` buffer put
 * a text into it. A forked child calls kp_forked (GIL) and begins anew.
 */
#ifndef KINETO_PYTHON_CALLS_H
#define KINETO_PYTHON_CALLS_H

#include <stddef.h>
#include <stdint.h>

#define KP_ABI 2 /* changes with any signature or structure below */
#define KP_EXPORT __attribute__((visibility("default")))

enum kp_error {
    KP_PYTHON = -1, /* this interpreter lacks a function, or is laid out in a way that is not known */
    KP_SYSTEM = -2, /* memory or descriptor refused by the system */
    KP_ORDER = -4,  /* called out of order */
};

struct kp_config {
    uint64_t buffer_limit_bytes;
    uint64_t buffer_bytes;
    uint64_t strings_bytes;
    uint64_t prefault_bytes;
};

struct kp_counts {
    uint64_t records;
    uint64_t bytes;
    uint64_t dropped;
};

struct kp_result {
    struct kp_counts counts;
    uint64_t threads;    /* that were recorded */
    uint64_t others;     /* threads left alone: the program's own profile function is set there, or a hook refused */
    uint64_t names_lost; /* calls whose names did not fit the string table */
    uint64_t elsewhere;  /* 1: there were other interpreters, whose threads cannot be recorded; else 0 */
    uint64_t full_ns;    /* Unix ns when no buffer was free: recording ended there; 0: never */
};

KP_EXPORT uint32_t kp_abi(void);
/* Finds the interpreter's functions; 0 if this one can be recorded. */
KP_EXPORT int kp_open(char *error, size_t error_bytes);
/* Makes the arena; returns its descriptor. */
KP_EXPORT int kp_prepare(const struct kp_config *config, char *error, size_t error_bytes);
/* The calling thread is not recorded. */
KP_EXPORT int kp_leave_out(void);
/* module_call: the code object of torch.nn.Module.__call__, or NULL. */
KP_EXPORT int kp_start(void *module_call, char *error, size_t error_bytes);
/* Threads that have begun since are recorded too; those that have another profile function now are let go. */
KP_EXPORT int kp_look(void);
KP_EXPORT int kp_counts(struct kp_counts *counts);
KP_EXPORT int kp_stop(struct kp_result *result);
KP_EXPORT int kp_close(void);
KP_EXPORT int kp_forked(void);

#endif
